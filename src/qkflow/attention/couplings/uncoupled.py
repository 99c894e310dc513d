"""The control: queries and keys evolve, but apart, with as many parameters as the coupling."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from qkflow.attention.couplings.base import (
    Coupling,
    FactoryKwargs,
    HeadNetworks,
    StepSize,
    check_steps,
    register,
)
from qkflow.attention.couplings.fused import add_low_rank, enter
from qkflow.attention.heads import HeadShapes


@register
class Uncoupled(Coupling):
    """q ← q + Δ·g(q) ; k ← k + Δ·h(k), n times.

    g and h share out the parameters of f: with as many key heads as query heads, each has half its width.
    """

    name = "uncoupled"
    equation = "q ← q + Δ·g(q) ; k ← k + Δ·h(k)"
    citation = "the control of Gahtan & Bronstein 2026, arXiv 2604.01683"
    good_for = "telling a gain of coupling from a gain of extra parameters"

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
    ) -> None:
        super().__init__(heads)
        self.steps = check_steps(steps)
        queries, keys = heads.n_q, heads.n_k
        matched = max(1, round(hidden_dim * queries / (queries + keys)))
        self.step = StepSize(queries, step, learn_step, step_per, factory_kwargs)
        self.query_network = HeadNetworks(
            queries, heads.head_dim, matched, factory_kwargs, shared=shared, bias=bias
        )
        self.key_network = HeadNetworks(
            keys, heads.head_dim, matched, factory_kwargs, shared=shared, bias=bias
        )

    def _key_step(self) -> Tensor:
        """Δ of each key head: its group's mean."""
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

    def extra_parameters(self) -> int:
        return self.query_network.n_params() + self.key_network.n_params() + self.step.n_params()

    def extra_flops(self) -> int:
        hidden = self.query_network.hidden_dim
        per_head = 4 * hidden * self.head_shapes.head_dim + (self.steps - 1) * 2 * hidden * hidden
        return (self.head_shapes.n_q + self.head_shapes.n_k) * per_head


def _flow(x: Tensor, network: HeadNetworks, delta: Tensor, steps: int) -> Tensor:
    """x ← x + Δ·f(x), n times, in the r dimensions that f sees (the idea of `latent`)."""
    w1 = network.per_head(network.w1)
    rows = network.per_head(network.w2).transpose(1, 2) * delta[:, None, None]  # Δ·W2ᵀ
    u = enter(x, w1)
    if network.b1 is not None:
        u = u + network.per_head(network.b1).unsqueeze(-1)
    sums = F.silu(u)
    bias = None if network.b2 is None else network.per_head(network.b2) * delta[:, None]
    mix = w1 @ rows.transpose(1, 2)
    for step in range(1, steps):
        now = torch.baddbmm(u, mix, sums)
        if bias is not None:
            now = now + step * (w1 @ bias.unsqueeze(-1))
        sums = sums + F.silu(now)
    out = add_low_rank(x, sums, rows)
    return out if bias is None else out + (steps * bias).to(out.dtype)
