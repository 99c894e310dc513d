"""Invertible affine coupling in the manner of RealNVP, identity at the start."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from qkflow.attention.circuits import FactorisedQK
from qkflow.attention.couplings.at_rest import AtRest, affine_at_rest
from qkflow.attention.couplings.base import (
    Coupling,
    HeadNetworks,
    Where,
    check_steps,
    group_mean,
    register,
    repeat_keys,
)
from qkflow.attention.couplings.fused import enter, scale_and_shift
from qkflow.attention.heads import Heads
from qkflow.errors import InputError


@register
class Affine(Coupling):
    """k ← k⊙exp(s₁(q)) + t₁(q) ; q ← q⊙exp(s₂(k)) + t₂(k), n times.

    s = bound·tanh(·) keeps the scale within e^±bound. The conditioners' last layers start at zero, so that
    the map starts as the identity; it has an exact inverse. Grouped heads: a key takes the mean of what its
    group's queries say, every query takes its group's key.
    """

    name = "affine"
    equation = "k ← k⊙exp(s₁(q)) + t₁(q) ; q ← q⊙exp(s₂(k)) + t₂(k)"
    citation = (
        "Gahtan & Bronstein 2026 (v2), arXiv 2604.01683; affine coupling: Dinh et al. 2017, arXiv 1605.08803"
    )
    good_for = (
        "a model that is already trained: it starts as the identity; composes with differential scoring"
    )
    identity_at_start = True
    invertible = True

    def __init__(
        self,
        heads: Heads,
        where: Where,
        *,
        steps: int = 1,
        hidden: int = 8,
        bound: float = 1.0,
        shared: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__(heads)
        if not 0 < bound < float("inf"):
            raise InputError(f"the bound of the affine scale must be a positive number, not {bound}")
        self.steps = check_steps(steps)
        self.bound = bound
        size = heads.size
        shape = {"out": 2 * size, "shared": shared, "bias": bias, "zero_output": True}
        self.from_query = HeadNetworks(heads.queries, size, hidden, where, **shape)  # type: ignore[arg-type]
        self.from_key = HeadNetworks(heads.queries, size, hidden, where, **shape)  # type: ignore[arg-type]

    def _split(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift = raw.chunk(2, dim=-1)
        return self.bound * torch.tanh(scale), shift

    def _for_key(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return self._split(group_mean(self.from_query(q), self.heads.group))

    def _for_query(self, k: Tensor) -> tuple[Tensor, Tensor]:
        return self._split(self.from_key(repeat_keys(k, self.heads.group)))

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        to_key, to_query = self._conditioners()
        for _ in range(self.steps):
            k = to_key(q, k, self.bound)
            q = to_query(k, q, self.bound)
        return q, k

    def at_rest(self, qk: FactorisedQK) -> AtRest:
        return affine_at_rest(self, qk)

    def idle(self) -> bool:
        said = [p for network in (self.from_query, self.from_key) for p in (network.w2, network.b2)]
        return not any(bool(p.any()) for p in said if p is not None)

    def _conditioners(self) -> tuple[_Conditioner, _Conditioner]:
        group = self.heads.group
        to_key = _Conditioner.of(self.from_query, self.heads.queries, group, 1 / group)
        return to_key, _Conditioner.of(self.from_key, self.heads.keys, 1, 1.0)

    def reference(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(self.steps):
            scale, shift = self._for_key(q)
            k = k * torch.exp(scale) + shift
            scale, shift = self._for_query(k)
            q = q * torch.exp(scale) + shift
        return q, k

    def inverse(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(self.steps):
            scale, shift = self._for_query(k)
            q = (q - shift) * torch.exp(-scale)
            scale, shift = self._for_key(q)
            k = (k - shift) * torch.exp(-scale)
        return q, k

    def extra_parameters(self) -> int:
        return self.from_query.count() + self.from_key.count()

    def extra_flops(self) -> int:
        hidden = self.from_query.hidden
        spoken = hidden + (self.from_query.b2 is not None)
        per_head = 2 * self.heads.size * (hidden + 2 * spoken)
        return 2 * self.steps * self.heads.queries * per_head


@dataclass(frozen=True)
class _Conditioner:
    """One half of the coupling in the low-rank form: silu(W1·source + b1), then s and t of the target."""

    w1: Tensor  # (source heads, …, D)
    b1: Tensor | None
    scale: Tensor  # (target heads, ρ, D)
    shift: Tensor

    @classmethod
    def of(cls, network: HeadNetworks, sources: int, group: int, share: float) -> _Conditioner:
        """`group` networks join to speak to one target, each with its `share` of the word."""
        w1 = network.per_head(network.w1)
        rows = network.per_head(network.w2).transpose(1, 2)
        b1 = None
        if network.b1 is not None and network.b2 is not None:
            b1 = network.per_head(network.b1).unsqueeze(-1)
            rows = torch.cat((rows, network.per_head(network.b2).unsqueeze(1)), dim=1)
        joined = share * rows.reshape(len(rows) // group, -1, rows.shape[-1])
        scale, shift = joined.chunk(2, dim=-1)
        return cls(w1.reshape(sources, -1, w1.shape[-1]), b1, scale, shift)

    def __call__(self, source: Tensor, target: Tensor, bound: float) -> Tensor:
        u = enter(source, self.w1)
        if self.b1 is None:
            latent = F.silu(u)
        else:  # a latent that is always one carries b2
            latent = F.silu(u.reshape(len(self.b1), -1, u.shape[-1]) + self.b1)
            latent = torch.cat((latent, torch.ones_like(latent[:, :1])), dim=1)
        return scale_and_shift(
            target, latent.reshape(len(self.scale), -1, u.shape[-1]), self.scale, self.shift, bound
        )
