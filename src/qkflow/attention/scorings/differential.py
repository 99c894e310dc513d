"""Differential attention: the difference of two softmaxes cancels what both attend to."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkflow.attention.init import ParamSampler, copy_into
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
from qkflow.errors import InputError


@register
class Differential(Scoring):
    """(softmax(q₁k₁ᵀ/√D) − λ·softmax(q₂k₂ᵀ/√D))·v, then RMSNorm per head, times 1 − λ_init.

    λ = exp(λq1·λk1) − exp(λq2·λk2) + λ_init, one per layer; λ_init = 0.8 − 0.6·exp(−0.3·layer).
    Where standard attention has H heads of size D, this has H/2 heads, each of two sub-heads of size D with
    values of size 2D. Sub-heads 2i and 2i+1 form head i; with grouped heads the order is (key head, sub-head,
    query of the group), so that contiguous groups share a key sub-head.
    """

    name = "differential"
    equation = "(softmax(q₁k₁ᵀ/√D) − λ·softmax(q₂k₂ᵀ/√D))·v"
    citation = "Ye et al. 2024, arXiv 2410.05258"
    good_for = "noise cancelling; the peer that couplings are compared with"
    eps = 1e-5

    def __init__(
        self, head_shapes: HeadShapes, dim: int, layer_idx: int, factory_kwargs: FactoryKwargs
    ) -> None:
        super().__init__()
        self.group_size = head_shapes.group_size
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer_idx)
        dtype = torch.promote_types(factory_kwargs.get("dtype") or torch.float32, torch.float32)
        vectors = torch.empty(4, head_shapes.head_dim, **{**factory_kwargs, "dtype": dtype})
        self.vectors = nn.Parameter(vectors)  # λq1, λk1, λq2, λk2
        self.norm = nn.Parameter(torch.empty(head_shapes.out_head_dim, **factory_kwargs))

    @staticmethod
    def head_shapes(n_heads: int, n_kv_heads: int, head_dim: int) -> HeadShapes:
        if n_heads % 2 or n_kv_heads % 2:
            raise InputError(
                f"differential scoring needs even n_heads and n_kv_heads, not {n_heads} and {n_kv_heads}",
                code="differential-odd-heads",
            )
        return HeadShapes(
            n_heads, n_kv_heads, n_kv_heads // 2, head_dim, 2 * head_dim, n_heads // 2, 2 * head_dim
        )

    def lambda_(self) -> Tensor:
        """Return λ."""
        q1, k1, q2, k2 = self.vectors
        return torch.exp(q1 @ k1) - torch.exp(q2 @ k2) + self.lambda_init

    def _subtract(self, out: Tensor, dim: int) -> Tensor:
        """Subtract λ times the second sub-heads along a dim ordered (key head, sub-head, query)."""
        pairs = out.unflatten(dim, (-1, 2, self.group_size))
        first, second = pairs.unbind(dim + 1)
        return (first - self.lambda_().to(first.dtype) * second).flatten(dim, dim + 1)

    def _normalize(self, out: Tensor) -> Tensor:
        return F.rms_norm(out, out.shape[-1:], self.norm, self.eps) * (1 - self.lambda_init)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, dropout: float, x: Tensor
    ) -> Tensor:
        # The fused kernels need one head_dim. Zero padding of q and k changes no score, and costs less than
        # running every softmax twice, once for each half of v.
        padding = v.shape[-1] - q.shape[-1]
        q, k = F.pad(q, (0, padding)), F.pad(k, (0, padding))
        v = v.repeat_interleave(2, dim=2)  # both sub-heads use the same values
        return self._normalize(self._subtract(sdpa(q, k, v, mask, scale, dropout), dim=2))

    def reference(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        weight = self._subtract(attention_weights(q, k, mask, scale), dim=1)
        return self._normalize(weighted_sum(weight, v)), weight

    def extra_parameters(self) -> int:
        return self.vectors.numel() + self.norm.numel()

    def init_parameters(self, sampler: ParamSampler) -> None:
        copy_into(self.vectors, sampler.normal("vectors", self.vectors.shape, 0.1))
        nn.init.ones_(self.norm)
