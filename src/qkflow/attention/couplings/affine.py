"""Invertible affine coupling in the manner of RealNVP, identity at the start."""

from __future__ import annotations

import torch
from torch import Tensor

from qkflow.attention.couplings.affine_step import Network, affine_step
from qkflow.attention.couplings.at_rest import AtRest, affine_at_rest
from qkflow.attention.couplings.base import (
    Coupling,
    FactoryKwargs,
    HeadNetworks,
    check_steps,
    group_mean,
    register,
    repeat_keys,
)
from qkflow.attention.heads import HeadShapes
from qkflow.attention.projections import FactorizedQK
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
    identity_at_init = True
    invertible = True

    def __init__(
        self,
        heads: HeadShapes,
        factory_kwargs: FactoryKwargs,
        *,
        steps: int = 1,
        hidden_dim: int = 8,
        bound: float = 1.0,
        shared: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__(heads)
        if not 0 < bound < float("inf"):
            raise InputError(f"the bound of the affine scale must be a positive number, not {bound}")
        self.steps = check_steps(steps)
        self.bound = bound
        size = heads.head_dim
        shape = {"out_dim": 2 * size, "shared": shared, "bias": bias, "zero_output": True}
        self.from_query = HeadNetworks(heads.n_q, size, hidden_dim, factory_kwargs, **shape)  # type: ignore[arg-type]
        self.from_key = HeadNetworks(heads.n_q, size, hidden_dim, factory_kwargs, **shape)  # type: ignore[arg-type]

    def _split(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift = raw.chunk(2, dim=-1)
        return self.bound * torch.tanh(scale), shift

    def _for_key(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return self._split(group_mean(self.from_query(q), self.head_shapes.group_size))

    def _for_query(self, k: Tensor) -> tuple[Tensor, Tensor]:
        return self._split(self.from_key(repeat_keys(k, self.head_shapes.group_size)))

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        from_query, from_key = (Network.of(part, q.dtype) for part in (self.from_query, self.from_key))
        for _ in range(self.steps):
            q, k = affine_step(q, k, from_query, from_key, self.bound)
        return q, k

    def at_rest(self, qk: FactorizedQK) -> AtRest:
        return affine_at_rest(self, qk)

    def idle(self) -> bool:
        said = [p for network in (self.from_query, self.from_key) for p in (network.w2, network.b2)]
        return not any(bool(p.any()) for p in said if p is not None)

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
        return self.from_query.n_params() + self.from_key.n_params()

    def extra_flops(self) -> int:
        hidden = self.from_query.hidden_dim
        spoken = hidden + (self.from_query.b2 is not None)
        per_head = 2 * self.head_shapes.head_dim * (hidden + 2 * spoken)
        return 2 * self.steps * self.head_shapes.n_q * per_head
