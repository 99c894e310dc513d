"""The control: queries and keys evolve separately, with as many parameters as the coupling."""

from __future__ import annotations

from torch import Tensor

from qkflow.attention.couplings.base import Coupling, FactoryKwargs, register
from qkflow.attention.couplings.layers import HeadNetworks, StepSize, check_steps
from qkflow.attention.couplings.low_rank import add_force
from qkflow.attention.projections import HeadShapes


@register
class Uncoupled(Coupling):
    """q ← q + Δ·g(q) ; k ← k + Δ·h(k), n times.

    g and h share the parameter count of f: with as many key heads as query heads, each has half its width.
    """

    name = "uncoupled"
    equation = "q ← q + Δ·g(q) ; k ← k + Δ·h(k)"
    citation = "the control of Gahtan & Bronstein 2026, arXiv 2604.01683"
    good_for = "telling a gain of coupling from a gain of extra parameters"

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
        super().__init__(head_shapes)
        self.steps = check_steps(steps)
        n_q, n_k, head_dim = head_shapes.n_q, head_shapes.n_k, head_shapes.head_dim
        matched = max(1, round(hidden_dim * n_q / (n_q + n_k)))
        self.step = StepSize(n_q, step, learn_step, step_per, factory_kwargs)
        self.query_network = HeadNetworks(n_q, head_dim, matched, factory_kwargs, shared=shared, bias=bias)
        self.key_network = HeadNetworks(n_k, head_dim, matched, factory_kwargs, shared=shared, bias=bias)

    def _key_step(self) -> Tensor:
        """Return Δ of each key head: the mean of its group."""
        return self.step.per_head().view(self.head_shapes.n_k, self.head_shapes.group_size).mean(dim=1)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (
            add_force(q, self.query_network.as_force(), self.step.per_head(), self.steps),
            add_force(k, self.key_network.as_force(), self._key_step(), self.steps),
        )

    def reference(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(self.steps):
            q = q + self.step.per_head()[:, None] * self.query_network(q)
            k = k + self._key_step()[:, None] * self.key_network(k)
        return q, k

    def diagnostics(self) -> dict[str, Tensor]:
        return {"step_size": self.step.per_head().detach()}

    def extra_flops(self) -> int:
        hidden, shapes = self.query_network.hidden_dim, self.head_shapes
        per_head = 4 * hidden * shapes.head_dim + (self.steps - 1) * 2 * hidden * hidden
        return (shapes.n_q + shapes.n_k) * per_head
