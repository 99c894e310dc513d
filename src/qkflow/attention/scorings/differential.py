"""Differential attention: the difference of two softmaxes cancels what both attend to."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkflow.attention.heads import HeadShapes
from qkflow.attention.init import ParamSampler, copy_into
from qkflow.attention.masks import Mask
from qkflow.attention.scorings.base import (
    FactoryKwargs,
    Scoring,
    attention_weights,
    register,
    sdpa,
    weighted_sum,
)
from qkflow.errors import InputError


@register
class Differential(Scoring):
    """(softmax(q₁k₁ᵀ/√D) − λ·softmax(q₂k₂ᵀ/√D))·v, then RMSNorm per head, times 1 − λ_init.

    λ = exp(λq1·λk1) − exp(λq2·λk2) + λ_init, one a layer; λ_init = 0.8 − 0.6·exp(−0.3·layer).
    Where standard attention has H heads of size D, this has H/2 heads, each of two sub-heads of size D with
    values of size 2D. Sub-heads 2i and 2i+1 form head i; with grouped heads the order is (key head, sub-head,
    query of the group), so that contiguous groups share a key sub-head.
    """

    name = "differential"
    equation = "(softmax(q₁k₁ᵀ/√D) − λ·softmax(q₂k₂ᵀ/√D))·v"
    citation = "Ye et al. 2024, arXiv 2410.05258"
    good_for = "noise cancelling; the peer that couplings are compared with"
    eps = 1e-5

    def __init__(self, heads: HeadShapes, width: int, layer: int, where: FactoryKwargs) -> None:
        super().__init__()
        self.group = heads.group_size
        self.layer_start = 0.8 - 0.6 * math.exp(-0.3 * layer)
        exact = {**where, "dtype": torch.promote_types(where.get("dtype") or torch.float32, torch.float32)}
        self.vectors = nn.Parameter(torch.empty(4, heads.head_dim, **exact))  # λq1, λk1, λq2, λk2
        self.norm = nn.Parameter(torch.empty(heads.out_head_dim, **where))

    @staticmethod
    def head_shapes(heads: int, kv_heads: int, size: int) -> HeadShapes:
        if heads % 2 or kv_heads % 2:
            raise InputError(
                f"differential scoring pairs heads: {heads} heads and {kv_heads} key/value heads must be even"
            )
        return HeadShapes(heads, kv_heads, kv_heads // 2, size, 2 * size, heads // 2, 2 * size)

    def strength(self) -> Tensor:
        """λ."""
        q1, k1, q2, k2 = self.vectors
        return torch.exp(q1 @ k1) - torch.exp(q2 @ k2) + self.layer_start

    def _subtract(self, gathered: Tensor, dim: int) -> Tensor:
        """First sub-heads minus λ times second ones along a dimension ordered (key head, sub-head, query)."""
        pairs = gathered.unflatten(dim, (-1, 2, self.group))
        first, second = pairs.unbind(dim + 1)
        return (first - self.strength().to(first.dtype) * second).flatten(dim, dim + 1)

    def _normalise(self, out: Tensor) -> Tensor:
        return F.rms_norm(out, out.shape[-1:], self.norm, self.eps) * (1 - self.layer_start)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, dropout: float, x: Tensor
    ) -> Tensor:
        # The fused kernels want one head size. Zeros appended to q and k change no score, and cost less
        # than running every softmax twice, once for each half of v.
        size = v.shape[-1] - q.shape[-1]
        q, k = F.pad(q, (0, size)), F.pad(k, (0, size))
        v = v.repeat_interleave(2, dim=2)  # both sub-heads gather the same values
        return self._normalise(self._subtract(sdpa(q, k, v, mask, scale, dropout), dim=2))

    def reference(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        weight = self._subtract(attention_weights(q, k, mask, scale), dim=1)
        return self._normalise(weighted_sum(weight, v)), weight

    def extra_parameters(self) -> int:
        return self.vectors.numel() + self.norm.numel()

    def start_parameters(self, draw: ParamSampler) -> None:
        copy_into(self.vectors, draw.normal("vectors", self.vectors.shape, 0.1))
        nn.init.ones_(self.norm)
