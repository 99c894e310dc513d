"""Standard softmax attention."""

from __future__ import annotations

from torch import Tensor

from qkflow.attention.heads import Heads
from qkflow.attention.masks import Mask
from qkflow.attention.scorings.base import Scoring, Where, fused, gather, register, weights


@register
class Softmax(Scoring):
    """softmax(q·kᵀ/√D)·v."""

    name = "softmax"
    equation = "softmax(q·kᵀ/√D)·v"
    citation = "Vaswani et al. 2017, arXiv 1706.03762"
    good_for = "the baseline"

    def __init__(self, heads: Heads, width: int, layer: int, where: Where) -> None:
        super().__init__()

    @staticmethod
    def heads(heads: int, kv_heads: int, size: int) -> Heads:
        return Heads(heads, kv_heads, kv_heads, size, size, heads, size)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, dropout: float, x: Tensor
    ) -> Tensor:
        return fused(q, k, v, mask, scale, dropout)

    def reference(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        weight = weights(q, k, mask, scale)
        return gather(weight, v), weight
