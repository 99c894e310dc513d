"""Leapfrog (kick-drift-kick) steps of the coupled dynamics; with `conservative`, a true symplectic map."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qkflow.attention.couplings.base import (
    FactoryKwargs,
    HeadNetworks,
    StepSize,
    group_mean,
    register,
    repeat_keys,
)
from qkflow.attention.couplings.euler import network_force
from qkflow.attention.couplings.latent import Force, LatentCoupling
from qkflow.attention.heads import HeadShapes
from qkflow.attention.init import ParamSampler, copy_into
from qkflow.errors import InputError


@register
class Leapfrog(LatentCoupling):
    """k½ = k + (Δ/2)·f(q) ; q ← q + Δ·k½ ; k ← k½ + (Δ/2)·f(q), n times.

    With `conservative`, f = −∇V for V(q) = Σ wᵢ·softplus(W1·q + b1)ᵢ: the map is then symplectic
    (JᵀΩJ = Ω) and H = ½‖k‖² + V(q) drifts by O(Δ²) only.
    """

    name = "leapfrog"
    equation = "k½ = k + (Δ/2)·f(q) ; q ← q + Δ·k½ ; k ← k½ + (Δ/2)·f(q)"
    citation = "Gahtan & Bronstein 2026, arXiv 2604.01683; conservative form: qkflow"
    good_for = (
        "an invertible, volume-preserving coupling; conservative=true when energy should mean something"
    )
    invertible = True
    scheme = "leapfrog"

    def __init__(
        self,
        heads: HeadShapes,
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
        folded: bool = False,
    ) -> None:
        super().__init__(
            heads, steps, StepSize(heads.n_q, step, learn_step, step_per, factory_kwargs), folded
        )
        self.conservative = conservative
        self.network: HeadNetworks | HeadPotentials
        if conservative:
            self.network = HeadPotentials(
                heads.n_q, heads.head_dim, hidden_dim, factory_kwargs, shared=shared, bias=bias
            )
        else:
            self.network = HeadNetworks(
                heads.n_q, heads.head_dim, hidden_dim, factory_kwargs, shared=shared, bias=bias
            )

    @property
    def symplectic(self) -> bool:
        # grouped queries share one key, so they are not pairs of a phase space
        return self.conservative and self.head_shapes.group_size == 1

    def force(self) -> Force:
        if isinstance(self.network, HeadPotentials):
            return self.network.as_force()
        return network_force(self.network)

    def reference(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.folded:
            q = q - self.steps * self.step.per_head()[:, None] * repeat_keys(k, self.head_shapes.group_size)
        return self._integrate(q, k, self.step.per_head())

    def inverse(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Time runs backwards: the scheme is symmetric, so −Δ undoes Δ exactly."""
        q, k = self._integrate(q, k, -self.step.per_head())
        if self.folded:
            q = q + self.steps * self.step.per_head()[:, None] * repeat_keys(k, self.head_shapes.group_size)
        return q, k

    def _integrate(self, q: Tensor, k: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        group, delta = self.head_shapes.group_size, delta[:, None]
        for _ in range(self.steps):
            k = k + group_mean(delta / 2 * self.network(q), group)
            q = q + delta * repeat_keys(k, group)
            k = k + group_mean(delta / 2 * self.network(q), group)
        return q, k

    def energy(self, q: Tensor, k: Tensor) -> Tensor:
        """H = ½‖k‖² + V(q) of each token and head (B, T, H); conservative form only."""
        if not isinstance(self.network, HeadPotentials):
            raise InputError("only a conservative leapfrog has an energy: build it with conservative=true")
        return 0.5 * repeat_keys(k, self.head_shapes.group_size).square().sum(-1) + self.network.potential(q)


class HeadPotentials(nn.Module):
    """V(q) = Σ wᵢ·softplus(W1·q + b1)ᵢ, whose force −∇V = −W1ᵀ·(w ⊙ sigmoid(W1·q + b1)) is low-rank too."""

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
        if hidden_dim < 1:
            raise InputError(f"the hidden size of a coupling network must be at least 1, not {hidden_dim}")
        count = 1 if shared else n_heads
        self.n_heads, self.hidden_dim = n_heads, hidden_dim
        self.w1 = nn.Parameter(torch.empty(count, hidden_dim, head_dim, **factory_kwargs))
        self.weight = nn.Parameter(torch.empty(count, hidden_dim, **factory_kwargs))
        self.b1 = nn.Parameter(torch.empty(count, hidden_dim, **factory_kwargs)) if bias else None

    def _latent(self, q: Tensor) -> Tensor:
        w1 = self.w1.expand(self.n_heads, -1, -1)
        u = torch.einsum("bthd,hrd->bthr", q, w1)
        return u if self.b1 is None else u + self.b1

    def potential(self, q: Tensor) -> Tensor:
        return (self.weight * nn.functional.softplus(self._latent(q))).sum(-1)

    def forward(self, q: Tensor) -> Tensor:
        """The force −∇V, in textbook form."""
        pull = self.weight * torch.sigmoid(self._latent(q))
        return -torch.einsum("bthr,hrd->bthd", pull, self.w1.expand(self.n_heads, -1, -1))

    def as_force(self) -> Force:
        w1 = self.w1.expand(self.n_heads, -1, -1)
        w2 = -(self.weight.unsqueeze(-1) * self.w1).transpose(1, 2).expand(self.n_heads, -1, -1)
        b1 = None if self.b1 is None else self.b1.expand(self.n_heads, -1)
        return Force(w1, w2, b1, None, "sigmoid")

    def n_params(self) -> int:
        count, hidden, size = self.w1.shape
        return count * hidden * (size + 1 + (self.b1 is not None))

    def init_parameters(self, sampler: ParamSampler) -> None:
        copy_into(self.w1, sampler.matrix("w1", self.w1.shape, self.w1.shape[-1]))
        copy_into(self.weight, sampler.matrix("weight", self.weight.shape, self.hidden_dim))
        if self.b1 is not None:
            nn.init.zeros_(self.b1)
