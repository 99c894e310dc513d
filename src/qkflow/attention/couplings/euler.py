"""Explicit Euler steps of the coupled dynamics."""

from __future__ import annotations

from torch import Tensor

from qkflow.attention.couplings.base import (
    FactoryKwargs,
    HeadNetworks,
    StepSize,
    group_mean,
    register,
    repeat_keys,
)
from qkflow.attention.couplings.latent import Force, LatentCoupling
from qkflow.attention.heads import HeadShapes


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
        folded: bool = False,
    ) -> None:
        super().__init__(
            heads, steps, StepSize(heads.n_q, step, learn_step, step_per, factory_kwargs), folded
        )
        self.network: HeadNetworks = HeadNetworks(
            heads.n_q, heads.head_dim, hidden_dim, factory_kwargs, shared=shared, bias=bias
        )

    def force(self) -> Force:
        return network_force(self.network)

    def reference(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        group, delta = self.head_shapes.group_size, self.step.per_head()[:, None]
        if self.folded:
            q = q - self.steps * delta * repeat_keys(k, group)
        for _ in range(self.steps):
            q, k = q + delta * repeat_keys(k, group), k + group_mean(delta * self.network(q), group)
        return q, k


def network_force(network: HeadNetworks) -> Force:
    b1 = None if network.b1 is None else network.per_head(network.b1)
    b2 = None if network.b2 is None else network.per_head(network.b2)
    return Force(network.per_head(network.w1), network.per_head(network.w2), b1, b2, "silu")
