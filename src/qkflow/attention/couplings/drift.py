"""The linear part of euler and leapfrog alone: a query drifts along its token's key."""

from __future__ import annotations

from torch import Tensor

from qkflow.attention.couplings.base import Coupling, FactoryKwargs, register
from qkflow.attention.couplings.layers import StepSize, add_drift, check_steps, repeat_keys
from qkflow.attention.projections import HeadShapes
from qkflow.errors import InputError


@register
class Drift(Coupling):
    """q ← q + Δ·k, n times; k stays.

    The map is linear, so it merges into the projection (W_Q + nΔ·W_K per head): a model trained with it
    exports as a plain standard transformer. It adds a symmetric, positive part to the score, so that a token
    attends to tokens like itself.

    With `fold_at` the training loop folds the drift into W_Q at that fraction of a run and fixes Δ at 0: a
    control that separates a good start from better dynamics.
    """

    name = "drift"
    equation = "q ← q + Δ·k"
    citation = "qkflow; the linear part of Gahtan & Bronstein 2026, arXiv 2604.01683"
    good_for = "the gain of a coupling at no cost: merge() folds it into W_Q"

    def __init__(
        self,
        head_shapes: HeadShapes,
        factory_kwargs: FactoryKwargs,
        *,
        steps: int = 1,
        step: float = 0.1,
        learn_step: bool = True,
        step_per: str = "head",
        fold_at: float = 0.0,
    ) -> None:
        super().__init__(head_shapes)
        if not 0 <= fold_at < 1:
            raise InputError(
                f"fold_at must be a fraction of the run between 0 and 1, or 0 for never, not {fold_at}",
                code="bad-fold-at",
            )
        self.fold_at = fold_at
        self.steps = check_steps(steps)
        self.step = StepSize(head_shapes.n_q, step, learn_step, step_per, factory_kwargs)

    @property
    def invertible(self) -> bool:
        return True

    @property
    def symplectic(self) -> bool:
        return self.head_shapes.group_size == 1  # a shear

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return add_drift(q, k, self.steps * self.step.per_head()), k

    def reference(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        delta = self.step.per_head()[:, None]
        for _ in range(self.steps):
            q = q + delta * repeat_keys(k, self.head_shapes.group_size)
        return q, k

    def inverse(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return add_drift(q, k, -self.steps * self.step.per_head()), k

    def is_identity(self) -> bool:
        return not bool(self.step.value.any())

    def linear_drift(self) -> Tensor:
        return self.steps * self.step.per_head().detach()

    def diagnostics(self) -> dict[str, Tensor]:
        return {"step_size": self.step.per_head().detach()}
