"""Standard softmax attention."""

from __future__ import annotations

from torch import Tensor

from qkflow.attention.masks import Mask
from qkflow.attention.projections import HeadShapes
from qkflow.attention.scorings.base import (
    FactoryKwargs,
    Scoring,
    attention_weights,
    register,
    sdpa,
    weighted_sum,
)


@register
class Softmax(Scoring):
    """softmax(q·kᵀ/√D)·v."""

    name = "softmax"
    equation = "softmax(q·kᵀ/√D)·v"
    citation = "Vaswani et al. 2017, arXiv 1706.03762"
    good_for = "the baseline"

    def __init__(
        self, head_shapes: HeadShapes, dim: int, layer_idx: int, factory_kwargs: FactoryKwargs
    ) -> None:
        super().__init__()

    @staticmethod
    def head_shapes(n_heads: int, n_kv_heads: int, head_dim: int) -> HeadShapes:
        return HeadShapes(n_heads, n_kv_heads, n_kv_heads, head_dim, head_dim, n_heads, head_dim)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, dropout: float, x: Tensor
    ) -> Tensor:
        return sdpa(q, k, v, mask, scale, dropout)

    def reference(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        weight = attention_weights(q, k, mask, scale)
        return weighted_sum(weight, v), weight
