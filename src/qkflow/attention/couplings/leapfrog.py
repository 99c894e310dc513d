"""Leapfrog (kick-drift-kick) steps of the coupled dynamics; with `conservative`, a symplectic map."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkflow.attention.couplings.base import FactoryKwargs, register
from qkflow.attention.couplings.layers import (
    HeadNetworks,
    LowRankForce,
    StepSize,
    check_hidden_dim,
    group_mean,
    repeat_keys,
)
from qkflow.attention.couplings.low_rank import LowRankCoupling
from qkflow.attention.init import ParamSampler, copy_into
from qkflow.attention.projections import HeadShapes
from qkflow.errors import InputError


@register
class Leapfrog(LowRankCoupling):
    """k½ = k + (Δ/2)·f(q) ; q ← q + Δ·k½ ; k ← k½ + (Δ/2)·f(q), n times.

    With `conservative`, f = −∇V for V(q) = Σ wᵢ·softplus(W1·q + b1)ᵢ. The map is then symplectic
    (JᵀΩJ = Ω) and H = ½‖k‖² + V(q) drifts by O(Δ²) only. `low_rank` has the fast form.
    """

    name = "leapfrog"
    equation = "k½ = k + (Δ/2)·f(q) ; q ← q + Δ·k½ ; k ← k½ + (Δ/2)·f(q)"
    citation = "Gahtan & Bronstein 2026, arXiv 2604.01683; conservative form: qkflow"
    good_for = "an invertible, volume-preserving coupling; conservative=true: symplectic, with an energy"
    scheme = "leapfrog"

    def __init__(
        self,
        head_shapes: HeadShapes,
        factory_kwargs: FactoryKwargs,
        *,
        steps: int = 1,
        step: float = 0.1,
        learn_step: bool = True,
        step_per: str = "head",
        hidden_dim: int = 8,
        shared: bool = False,
        bias: bool = False,
        conservative: bool = False,
    ) -> None:
        n_q, head_dim = head_shapes.n_q, head_shapes.head_dim
        super().__init__(head_shapes, steps, StepSize(n_q, step, learn_step, step_per, factory_kwargs))
        self.conservative = conservative
        kind = HeadPotentials if conservative else HeadNetworks
        self.network: HeadNetworks | HeadPotentials = kind(
            n_q, head_dim, hidden_dim, factory_kwargs, shared=shared, bias=bias
        )

    @property
    def invertible(self) -> bool:
        return True

    @property
    def symplectic(self) -> bool:
        # grouped queries share one key: (q, k) are not conjugate pairs
        return self.conservative and self.head_shapes.group_size == 1

    def reference(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self._integrate_textbook(q, k, self.step.per_head())

    def inverse(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the preimage. The scheme is time-symmetric, so −Δ undoes Δ exactly."""
        return self._integrate_textbook(q, k, -self.step.per_head())

    def _integrate_textbook(self, q: Tensor, k: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        group, delta = self.head_shapes.group_size, delta[:, None]
        for _ in range(self.steps):
            k = k + group_mean(delta / 2 * self.network(q), group)
            q = q + delta * repeat_keys(k, group)
            k = k + group_mean(delta / 2 * self.network(q), group)
        return q, k

    def energy(self, q: Tensor, k: Tensor) -> Tensor:
        """Return H = ½‖k‖² + V(q) of each token and head (B, T, H); conservative form only."""
        if not isinstance(self.network, HeadPotentials):
            raise InputError(
                "only a conservative leapfrog has an energy: build it with conservative=true",
                code="not-conservative",
            )
        return 0.5 * repeat_keys(k, self.head_shapes.group_size).square().sum(-1) + self.network.potential(q)


class HeadPotentials(nn.Module):
    """V(q) = Σ wᵢ·softplus(W1·q + b1)ᵢ per head, with the force −∇V = −W1ᵀ·(w ⊙ sigmoid(W1·q + b1))."""

    def __init__(
        self,
        n_heads: int,
        head_dim: int,
        hidden_dim: int,
        factory_kwargs: FactoryKwargs,
        *,
        shared: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__()
        check_hidden_dim(hidden_dim)
        count = 1 if shared else n_heads
        self.n_heads, self.hidden_dim = n_heads, hidden_dim
        self.w1 = nn.Parameter(torch.empty(count, hidden_dim, head_dim, **factory_kwargs))
        self.weight = nn.Parameter(torch.empty(count, hidden_dim, **factory_kwargs))
        self.b1 = nn.Parameter(torch.empty(count, hidden_dim, **factory_kwargs)) if bias else None

    def _latent(self, q: Tensor) -> Tensor:
        u = torch.einsum("bthd,hrd->bthr", q, self.w1.expand(self.n_heads, -1, -1))
        return u if self.b1 is None else u + self.b1

    def potential(self, q: Tensor) -> Tensor:
        """Return V (B, T, H)."""
        return (self.weight * F.softplus(self._latent(q))).sum(-1)

    def forward(self, q: Tensor) -> Tensor:
        """Return the force −∇V (B, T, H, D), in the textbook form."""
        slope = self.weight * torch.sigmoid(self._latent(q))
        return -torch.einsum("bthr,hrd->bthd", slope, self.w1.expand(self.n_heads, -1, -1))

    def as_force(self) -> LowRankForce:
        """Return the force of all heads in factorized form."""
        w2 = -(self.weight.unsqueeze(-1) * self.w1).transpose(1, 2)
        n = self.n_heads
        b1 = None if self.b1 is None else self.b1.expand(n, -1)
        return LowRankForce(self.w1.expand(n, -1, -1), w2.expand(n, -1, -1), b1, activation="sigmoid")

    def init_parameters(self, sampler: ParamSampler) -> None:
        copy_into(self.w1, sampler.matrix("w1", self.w1.shape, self.w1.shape[-1]))
        copy_into(self.weight, sampler.matrix("weight", self.weight.shape, self.hidden_dim))
        if self.b1 is not None:
            nn.init.zeros_(self.b1)
