"""Invertible affine coupling (RealNVP), identity at init."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from qkflow.attention.couplings.base import Coupling, FactoryKwargs, PreparedQK, register
from qkflow.attention.couplings.layers import (
    HeadNetworks,
    check_steps,
    group_mean,
    heads_first,
    repeat_keys,
    tokens_first,
)
from qkflow.attention.projections import FactorizedQK, HeadShapes, stack_linear
from qkflow.errors import InputError


@dataclass(frozen=True)
class _ConditionerWeights:
    """Conditioners as batched matmuls; one network per query head.

    w1 (sources, D, ρ), b1 (networks, 1, r) or None, double_scale and shift (targets, ρ, D)

    The networks that condition one target are one matmul over their stacked latents, so that no output
    wider than the target is formed. A latent that is always 1 multiplies the bias b2.
    """

    w1: Tensor
    b1: Tensor | None
    double_scale: Tensor
    shift: Tensor

    @classmethod
    def build(
        cls, networks: HeadNetworks, n_sources: int, n_targets: int, dtype: torch.dtype
    ) -> _ConditionerWeights:
        force = networks.as_force()
        w1 = force.w1.reshape(n_sources, -1, force.w1.shape[-1]).transpose(1, 2)
        rows, b1 = force.w2.transpose(1, 2), None
        if force.b1 is not None and force.b2 is not None:
            b1 = force.b1.unsqueeze(1).to(dtype)
            rows = torch.cat((rows, force.b2.unsqueeze(1)), dim=1)
        n_networks = len(rows)
        if n_networks != n_targets:  # a target uses the mean of its networks
            rows = rows.reshape(n_targets, -1, rows.shape[-1]) * (n_targets / n_networks)
        scale, shift = rows.to(dtype).chunk(2, dim=-1)
        return cls(w1.to(dtype), b1, 2 * scale, shift)

    def latents(self, source: Tensor, n_networks: int) -> Tensor:
        """Return (targets, N, ρ) of a source (sources, N, D)."""
        u = _regroup(torch.bmm(source, self.w1), n_networks)
        if self.b1 is None:
            return _regroup(F.silu(u), len(self.shift))
        u = u + self.b1
        return _regroup(torch.cat((F.silu(u), torch.ones_like(u[..., :1])), dim=-1), len(self.shift))


def _regroup(x: Tensor, n_groups: int) -> Tensor:
    """Regroup latents (groups, N, ρ) into `n_groups` contiguous groups."""
    if len(x) == n_groups:
        return x
    if len(x) < n_groups:
        return x.unflatten(-1, (n_groups // len(x), -1)).transpose(1, 2).flatten(0, 1)
    return x.unflatten(0, (n_groups, -1)).transpose(1, 2).flatten(2)


@register
class Affine(Coupling):
    """k ← k⊙exp(s₁(q)) + t₁(q) ; q ← q⊙exp(s₂(k)) + t₂(k), n times.

    s = bound·tanh(·) keeps the scale within e^±bound. The last layers of the conditioners are zero at init,
    so the map starts as the identity. It has an exact inverse. Grouped heads: a key uses the mean of its
    group's conditioner outputs, every query uses its group's key.
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

    def __init__(
        self,
        head_shapes: HeadShapes,
        factory_kwargs: FactoryKwargs,
        *,
        steps: int = 1,
        hidden_dim: int = 8,
        bound: float = 1.0,
        shared: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__(head_shapes)
        if not 0 < bound < float("inf"):
            raise InputError(f"bound must be a positive number, not {bound}", code="bad-bound")
        self.steps = check_steps(steps)
        self.bound = bound

        def conditioner() -> HeadNetworks:
            n_q, head_dim = head_shapes.n_q, head_shapes.head_dim
            return HeadNetworks(
                n_q,
                head_dim,
                hidden_dim,
                factory_kwargs,
                out_dim=2 * head_dim,
                shared=shared,
                bias=bias,
                zero_output=True,
            )

        self.from_query, self.from_key = conditioner(), conditioner()

    @property
    def invertible(self) -> bool:
        return True

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self._transform_all(q, k, *self._conditioner_weights(q.dtype))

    def prepare_for_inference(self, qk: FactorizedQK) -> PreparedQK:
        """Build the weights of the conditioners once."""
        with torch.no_grad():
            for_key, for_query = self._conditioner_weights(qk.q.weight.dtype)

        def finish(q: Tensor, k: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
            return self._transform_all(q, k, for_key, for_query)

        weight, bias = stack_linear([(qk.q.weight, qk.q.bias), (qk.k.weight, qk.k.bias)])
        return PreparedQK(self.head_shapes, weight, bias, finish)

    def _conditioner_weights(self, dtype: torch.dtype) -> tuple[_ConditionerWeights, _ConditionerWeights]:
        """Return the weights that transform keys, and those that transform queries."""
        n_q, n_k = self.head_shapes.n_q, self.head_shapes.n_k
        return (
            _ConditionerWeights.build(self.from_query, n_q, n_k, dtype),
            _ConditionerWeights.build(self.from_key, n_k, n_q, dtype),
        )

    def _transform_all(
        self, q: Tensor, k: Tensor, for_key: _ConditionerWeights, for_query: _ConditionerWeights
    ) -> tuple[Tensor, Tensor]:
        batch_and_length = q.shape[:2]
        q, k = heads_first(q), heads_first(k)
        for _ in range(self.steps):
            k = self._transform(k, q, for_key)
            q = self._transform(q, k, for_query)
        return tokens_first(q, batch_and_length), tokens_first(k, batch_and_length)

    def _transform(self, target: Tensor, source: Tensor, weights: _ConditionerWeights) -> Tensor:
        """Return target⊙exp(s) + t, with (s, t) from the source; both are (heads, N, D)."""
        latents = weights.latents(source, self.head_shapes.n_q)
        gate = torch.sigmoid(torch.bmm(latents, weights.double_scale))
        # bound·tanh(·) as bound·(2·gate − 1): sigmoid takes a third of the time of tanh
        s = torch.rsub(gate, -self.bound, alpha=-2 * self.bound)
        return torch.baddbmm(target * torch.exp(s), latents, weights.shift)

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

    def _for_key(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return self._scale_and_shift(group_mean(self.from_query(q), self.head_shapes.group_size))

    def _for_query(self, k: Tensor) -> tuple[Tensor, Tensor]:
        return self._scale_and_shift(self.from_key(repeat_keys(k, self.head_shapes.group_size)))

    def _scale_and_shift(self, output: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift = output.chunk(2, dim=-1)
        return self.bound * torch.tanh(scale), shift

    def is_identity(self) -> bool:
        outputs = [p for network in (self.from_query, self.from_key) for p in (network.w2, network.b2)]
        return not any(bool(p.any()) for p in outputs if p is not None)

    def extra_flops(self) -> int:
        hidden = self.from_query.hidden_dim
        latents = hidden + (self.from_query.b2 is not None)
        per_head = 2 * self.head_shapes.head_dim * (hidden + 2 * latents)
        return 2 * self.steps * self.head_shapes.n_q * per_head
