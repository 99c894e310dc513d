"""Explicit Euler steps of the coupled dynamics."""

from __future__ import annotations

from torch import Tensor

from qkflow.attention.couplings.base import FactoryKwargs, register
from qkflow.attention.couplings.layers import HeadNetworks, StepSize, group_mean, repeat_keys
from qkflow.attention.couplings.low_rank import LowRankCoupling
from qkflow.attention.projections import HeadShapes


@register
class Euler(LowRankCoupling):
    """q ← q + Δ·k ; k ← k + Δ·f(q), both from the old values, n times.

    f(q) = W2·silu(W1·q + b1) + b2, one network per head. Δ is learned. `low_rank` has the fast form.
    """

    name = "euler"
    equation = "q ← q + Δ·k ; k ← k + Δ·f(q)"
    citation = "Gahtan & Bronstein 2026, arXiv 2604.01683"
    good_for = "the paper's simplest coupling; one step suffices there"
    scheme = "euler"

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
    ) -> None:
        n_q, head_dim = head_shapes.n_q, head_shapes.head_dim
        super().__init__(head_shapes, steps, StepSize(n_q, step, learn_step, step_per, factory_kwargs))
        self.network: HeadNetworks = HeadNetworks(
            n_q, head_dim, hidden_dim, factory_kwargs, shared=shared, bias=bias
        )

    def reference(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        group, delta = self.head_shapes.group_size, self.step.per_head()[:, None]
        for _ in range(self.steps):
            q, k = q + delta * repeat_keys(k, group), k + group_mean(delta * self.network(q), group)
        return q, k
