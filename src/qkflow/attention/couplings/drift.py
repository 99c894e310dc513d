"""The linear part of every coupling, alone: a query drifts along its own token's key."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from qkflow.attention.couplings.at_rest import AtRest, drift_at_rest
from qkflow.attention.couplings.base import (
    Coupling,
    FactoryKwargs,
    StepSize,
    add_drift,
    check_steps,
    register,
    repeat_keys,
)
from qkflow.attention.heads import HeadShapes
from qkflow.attention.projections import FactorizedQK


@register
class Drift(Coupling):
    """q ← q + Δ·k, n times; k stays.

    Linear, so it folds into the projection (W_Q + nΔ·W_K per head): a model trained with it exports as a
    plain standard transformer. It puts a symmetric, positive part into the score, so that a token looks
    for tokens like itself.
    """

    name = "drift"
    equation = "q ← q + Δ·k"
    citation = "qkflow; the linear part of Gahtan & Bronstein 2026, arXiv 2604.01683"
    good_for = "the gain of a coupling at no cost: merge() folds it into W_Q"
    invertible = True

    def __init__(
        self,
        heads: HeadShapes,
        factory_kwargs: FactoryKwargs,
        *,
        steps: int = 1,
        step: float = 0.1,
        learn_step: bool = True,
        step_per: str = "head",
    ) -> None:
        super().__init__(heads)
        self.steps = check_steps(steps)
        self.step = StepSize(heads.n_q, step, learn_step, step_per, factory_kwargs)

    @property
    def symplectic(self) -> bool:
        return self.head_shapes.group_size == 1  # a shear

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return add_drift(q, k, self.steps * self.step.per_head()), k

    def together(self, x: Tensor, qk: FactorizedQK) -> tuple[Tensor, Tensor]:
        few = x.shape[0] * x.shape[1] < qk.q.out_features
        if few or not self.multiplies(qk):
            return super().together(x, qk)  # few tokens do not pay for a sum of weights
        weight, bias = qk.drifted_query_projection(self.steps * self.step.per_head())
        q = F.linear(x, weight, bias).unflatten(-1, (self.head_shapes.n_q, self.head_shapes.head_dim))
        return q, qk.project_keys(x)

    def at_rest(self, qk: FactorizedQK) -> AtRest:
        return drift_at_rest(self, qk)

    def reference(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        delta = self.step.per_head()[:, None]
        for _ in range(self.steps):
            q = q + delta * repeat_keys(k, self.head_shapes.group_size)
        return q, k

    def inverse(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return add_drift(q, k, -self.steps * self.step.per_head()), k

    def extra_parameters(self) -> int:
        return self.step.n_params()

    def take_linear_drift(self) -> Tensor:
        return self.steps * self.step.per_head().detach()
