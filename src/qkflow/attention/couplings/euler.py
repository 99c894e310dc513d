"""Explicit Euler steps of the coupled dynamics."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from qkflow.attention.couplings.base import (
    Coupling,
    HeadNetworks,
    StepSize,
    Where,
    check_steps,
    group_mean,
    register,
    repeat_keys,
)
from qkflow.attention.couplings.latent import Force, evolve
from qkflow.attention.heads import Heads


@register
class Euler(Coupling):
    """q ← q + Δ·k ; k ← k + Δ·f(q), both from the old values, n times.

    f(q) = W2·silu(W1·q + b1) + b2, a network a head; Δ is learned.
    """

    name = "euler"
    equation = "q ← q + Δ·k ; k ← k + Δ·f(q)"
    citation = "Gahtan & Bronstein 2026, arXiv 2604.01683"
    good_for = "the paper's simplest coupling; one step suffices there"

    def __init__(
        self,
        heads: Heads,
        where: Where,
        *,
        steps: int = 1,
        step: float = 0.1,
        learn_step: bool = True,
        step_per: str = "head",
        hidden: int = 8,
        shared: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__(heads)
        self.steps = check_steps(steps)
        self.folded = False
        self.step = StepSize(heads.queries, step, learn_step, step_per, where)
        self.network = HeadNetworks(heads.queries, heads.size, hidden, where, shared=shared, bias=bias)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return evolve(
            q, k, network_force(self.network), self.step(), self.steps, "euler", self.heads, self.folded
        )

    def reference(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        group, delta = self.heads.group, self.step()[:, None]
        if self.folded:
            q = q - self.steps * delta * repeat_keys(k, group)
        for _ in range(self.steps):
            q, k = q + delta * repeat_keys(k, group), k + group_mean(delta * self.network(q), group)
        return q, k

    def extra_parameters(self) -> int:
        return self.network.count() + self.step.count()

    def extra_flops(self) -> int:
        return trajectory_flops(self.heads, self.network.hidden, self.steps, "euler", self.folded)

    def fold(self) -> Tensor | None:
        if self.folded:
            return None
        self.folded = True
        return self.steps * self.step().detach()


def network_force(network: HeadNetworks) -> Force:
    b1 = None if network.b1 is None else network.per_head(network.b1)
    b2 = None if network.b2 is None else network.per_head(network.b2)
    return Force(network.per_head(network.w1), network.per_head(network.w2), b1, b2, F.silu)


def trajectory_flops(heads: Heads, hidden: int, steps: int, scheme: str, folded: bool) -> int:
    """Products per token of the exact cheap form: entries, steps, exits."""
    latent = heads.group * hidden  # of one key head
    thin = 2 * heads.keys * latent * heads.size  # one D-to-latent product over all heads
    euler = scheme == "euler"
    entry = thin * (1 if euler and steps == 1 and not folded else 2)
    mixes = max(steps - 2, 0) if euler else steps
    out_q = 0 if euler and steps == 1 else heads.group * thin
    return entry + mixes * 2 * heads.keys * latent * latent + thin + out_q
