"""Explicit Euler steps of the coupled dynamics."""

from __future__ import annotations

from torch import Tensor

from qkflow.attention.couplings.base import (
    HeadNetworks,
    StepSize,
    Where,
    group_mean,
    register,
    repeat_keys,
)
from qkflow.attention.couplings.latent import Force, LatentCoupling
from qkflow.attention.heads import Heads


@register
class Euler(LatentCoupling):
    """q ← q + Δ·k ; k ← k + Δ·f(q), both from the old values, n times.

    f(q) = W2·silu(W1·q + b1) + b2, a network a head; Δ is learned.
    """

    name = "euler"
    equation = "q ← q + Δ·k ; k ← k + Δ·f(q)"
    citation = "Gahtan & Bronstein 2026, arXiv 2604.01683"
    good_for = "the paper's simplest coupling; one step suffices there"
    scheme = "euler"

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
        folded: bool = False,
    ) -> None:
        super().__init__(heads, steps, StepSize(heads.queries, step, learn_step, step_per, where), folded)
        self.network: HeadNetworks = HeadNetworks(
            heads.queries, heads.size, hidden, where, shared=shared, bias=bias
        )

    def force(self) -> Force:
        return network_force(self.network)

    def reference(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        group, delta = self.heads.group, self.step.per_head()[:, None]
        if self.folded:
            q = q - self.steps * delta * repeat_keys(k, group)
        for _ in range(self.steps):
            q, k = q + delta * repeat_keys(k, group), k + group_mean(delta * self.network(q), group)
        return q, k


def network_force(network: HeadNetworks) -> Force:
    b1 = None if network.b1 is None else network.per_head(network.b1)
    b2 = None if network.b2 is None else network.per_head(network.b2)
    return Force(network.per_head(network.w1), network.per_head(network.w2), b1, b2, "silu")
