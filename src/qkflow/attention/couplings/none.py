"""No coupling: standard attention."""

from __future__ import annotations

from torch import Tensor

from qkflow.attention.couplings.at_rest import AtRest, plain
from qkflow.attention.couplings.base import Coupling, FactoryKwargs, register
from qkflow.attention.heads import HeadShapes
from qkflow.attention.projections import FactorizedQK


@register
class NoCoupling(Coupling):
    """q ← q ; k ← k."""

    name = "none"
    equation = "q ← q ; k ← k"
    citation = "Vaswani et al. 2017, arXiv 1706.03762"
    good_for = "the baseline"
    identity_at_init = True
    invertible = True

    def __init__(self, heads: HeadShapes, factory_kwargs: FactoryKwargs) -> None:
        super().__init__(heads)

    @property
    def symplectic(self) -> bool:
        return self.head_shapes.group_size == 1

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k

    def from_input(self, x: Tensor, qk: FactorizedQK, in_midst: bool = False) -> tuple[Tensor, Tensor]:
        return qk(x, x)

    def at_rest(self, qk: FactorizedQK) -> AtRest:
        return AtRest(*plain(qk))

    def idle(self) -> bool:
        return True

    def reference(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k

    def inverse(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k
