"""Standard softmax attention."""

from __future__ import annotations

from torch import Tensor

from qkflow.attention.heads import HeadShapes
from qkflow.attention.masks import Mask
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

    def __init__(self, heads: HeadShapes, width: int, layer: int, where: FactoryKwargs) -> None:
        super().__init__()

    @staticmethod
    def head_shapes(heads: int, kv_heads: int, size: int) -> HeadShapes:
        return HeadShapes(heads, kv_heads, kv_heads, size, size, heads, size)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, dropout: float, x: Tensor
    ) -> Tensor:
        return sdpa(q, k, v, mask, scale, dropout)

    def reference(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        weight = attention_weights(q, k, mask, scale)
        return weighted_sum(weight, v), weight
