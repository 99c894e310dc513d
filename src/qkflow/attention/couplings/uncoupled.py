"""The control: queries and keys evolve separately, with as many parameters as the coupling."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from qkflow.attention.couplings.base import Coupling, FactoryKwargs, register
from qkflow.attention.couplings.layers import HeadNetworks, StepSize, check_steps
from qkflow.attention.couplings.low_rank import add_low_rank, project_latents
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
            _flow(q, self.query_network, self.step.per_head(), self.steps),
            _flow(k, self.key_network, self._key_step(), self.steps),
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


def _flow(x: Tensor, network: HeadNetworks, delta: Tensor, steps: int) -> Tensor:
    """Apply x ← x + Δ·f(x) n times, in the r dimensions that f reads (as in `low_rank`)."""
    force, dtype = network.as_force(), x.dtype
    rows = force.w2.transpose(1, 2) * delta[:, None, None]  # Δ·W2ᵀ
    u = project_latents(x, force.w1.to(dtype))
    if force.b1 is not None:
        u = u + force.b1.unsqueeze(-1).to(dtype)
    kicks = F.silu(u)
    bias = None if force.b2 is None else force.b2 * delta[:, None]
    mix = (force.w1 @ rows.transpose(1, 2)).to(dtype)
    for step in range(1, steps):
        u_step = torch.baddbmm(u, mix, kicks)
        if bias is not None:
            u_step = u_step + step * (force.w1 @ bias.unsqueeze(-1)).to(dtype)
        kicks = kicks + F.silu(u_step)
    out = add_low_rank(x, kicks, rows.to(dtype))
    return out if bias is None else out + (steps * bias).to(dtype)
