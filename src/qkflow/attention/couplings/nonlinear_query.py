"""The control without a coupling: a nonlinear query, with the network of euler."""

from __future__ import annotations

from torch import Tensor

from qkflow.attention.couplings.base import Coupling, FactoryKwargs, register
from qkflow.attention.couplings.layers import HeadNetworks
from qkflow.attention.couplings.low_rank import add_force
from qkflow.attention.projections import HeadShapes


@register
class NonlinearQuery(Coupling):
    """q ← q + f(q) ; k stays.

    f(q) = W2·silu(W1·q + b1) + b2 is the network of euler: 2·r·D parameters per query head. The query does
    not depend on its token's key, and there is no step size.
    """

    name = "nonlinear_query"
    equation = "q ← q + f(q)"
    citation = "qkflow; a nonlinear query without coupling: arXiv 2603.13381"
    good_for = "telling a gain of coupling from a gain of a nonlinear query"

    def __init__(
        self,
        head_shapes: HeadShapes,
        factory_kwargs: FactoryKwargs,
        *,
        hidden_dim: int = 8,
        shared: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__(head_shapes)
        self.network = HeadNetworks(
            head_shapes.n_q, head_shapes.head_dim, hidden_dim, factory_kwargs, shared=shared, bias=bias
        )

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return add_force(q, self.network.as_force()), k

    def reference(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q + self.network(q), k

    def extra_flops(self) -> int:
        return 4 * self.head_shapes.n_q * self.network.hidden_dim * self.head_shapes.head_dim
