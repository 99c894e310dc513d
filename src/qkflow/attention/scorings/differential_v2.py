"""Differential attention, second version: twice the query heads over shared keys and values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qkflow.attention.init import ParamSampler
from qkflow.attention.masks import Mask
from qkflow.attention.projections import HeadShapes
from qkflow.attention.scorings import paired
from qkflow.attention.scorings.base import (
    FactoryKwargs,
    Scoring,
    attention_weights,
    register,
    sdpa,
    weighted_sum,
)


@register
class DifferentialV2(Scoring):
    """attn(q₁)·v − sigmoid(λ(x))·attn(q₂)·v, with λ per token and head from a projection of the input.

    Query heads 2i and 2i+1 share a key and form head i; no norm follows.
    """

    name = "differential_v2"
    equation = "softmax(q₁kᵀ/√D)·v − sigmoid(λ(x))·softmax(q₂kᵀ/√D)·v"
    citation = "Ye et al., differential transformer V2 (the authors' later code)"
    good_for = "differential attention at the decoding cost of the baseline's cache"

    def __init__(
        self, head_shapes: HeadShapes, dim: int, layer_idx: int, factory_kwargs: FactoryKwargs
    ) -> None:
        super().__init__()
        self.strength = nn.Linear(dim, head_shapes.n_out, bias=False, **factory_kwargs)

    @staticmethod
    def head_shapes(n_heads: int, n_kv_heads: int, head_dim: int) -> HeadShapes:
        return HeadShapes(2 * n_heads, n_kv_heads, n_kv_heads, head_dim, head_dim, n_heads, head_dim)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, dropout: float, x: Tensor
    ) -> Tensor:
        strength = torch.sigmoid(self.strength(x))
        if paired.supports(q, k, v, mask, dropout) and strength.dtype == q.dtype:
            return paired.softmax_difference(q, k, v, strength, scale)
        first, second = sdpa(q, k, v, mask, scale, dropout).unflatten(2, (-1, 2)).unbind(3)
        return first - strength.unsqueeze(-1) * second

    def reference(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        first, second = attention_weights(q, k, mask, scale).unflatten(1, (-1, 2)).unbind(2)
        strength = torch.sigmoid(self.strength(x)).transpose(1, 2).unsqueeze(-1)  # (B, H, T, 1)
        weight = first - strength * second
        return weighted_sum(weight, v), weight

    def extra_parameters(self) -> int:
        return self.strength.weight.numel()

    def init_parameters(self, sampler: ParamSampler) -> None:
        sampler.init_linear("strength", self.strength)
