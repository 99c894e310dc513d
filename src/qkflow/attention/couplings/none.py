"""No coupling: standard attention."""

from __future__ import annotations

from torch import Tensor

from qkflow.attention.couplings.base import Coupling, FactoryKwargs, register
from qkflow.attention.projections import HeadShapes


@register
class NoCoupling(Coupling):
    """q ← q ; k ← k."""

    name = "none"
    equation = "q ← q ; k ← k"
    citation = "Vaswani et al. 2017, arXiv 1706.03762"
    good_for = "the baseline"
    identity_at_init = True

    def __init__(self, head_shapes: HeadShapes, factory_kwargs: FactoryKwargs) -> None:
        super().__init__(head_shapes)

    @property
    def invertible(self) -> bool:
        return True

    @property
    def symplectic(self) -> bool:
        return self.head_shapes.group_size == 1

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k

    reference = inverse = forward

    def is_identity(self) -> bool:
        return True
