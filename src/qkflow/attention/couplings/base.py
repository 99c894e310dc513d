"""The contract of a coupling, and the registry of all couplings.

Shapes: q is (B, T, H, D) and k is (B, T, G, D), with H query heads and G key heads. Query head h uses key
head h // (H/G).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkflow.attention.projections import FactorizedQK, HeadShapes, stack_linear
from qkflow.attention.registry import Registry, Spec
from qkflow.errors import InputError

FactoryKwargs = dict[str, Any]  # device and dtype


class Coupling(nn.Module):
    """A map of each token's own (q, k). The contract tests check what a subclass declares."""

    name: ClassVar[str]
    equation: ClassVar[str]
    citation: ClassVar[str]
    good_for: ClassVar[str]
    identity_at_init: ClassVar[bool] = False
    # Fraction of a training run at which a linear drift is folded into W_Q; 0: never.
    fold_at: float = 0.0
    aliases: ClassVar[dict[str, str]] = {
        "n": "steps",
        "delta": "step",
        "r": "hidden_dim",
        "hidden": "hidden_dim",
    }

    def __init__(self, head_shapes: HeadShapes) -> None:
        super().__init__()
        self.head_shapes = head_shapes

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the coupled (q, k), in the fast form."""
        raise NotImplementedError

    def reference(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the coupled (q, k) in the textbook form, which defines correctness."""
        raise NotImplementedError

    def inverse(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (q, k) that `forward` maps to these."""
        raise InputError(f"coupling '{self.name}' has no inverse", code="no-inverse")

    @property
    def invertible(self) -> bool:
        """Whether `inverse` exists. May depend on the options and on the heads."""
        return False

    @property
    def symplectic(self) -> bool:
        """Whether the Jacobian J of (q, k) satisfies JᵀΩJ = Ω for all parameter values."""
        return False

    def is_identity(self) -> bool:
        """Whether the current parameters map every (q, k) exactly to itself."""
        return False

    def linear_drift(self) -> Tensor | None:
        """Return d (H,) if the whole map is q_h + d_h·k, k. None if it is not: it cannot be merged."""
        return None

    @torch.no_grad()
    def remove_drift(self) -> None:
        """Fix the linear drift at zero, after it was folded. The default sets all parameters to zero."""
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.requires_grad_(False).zero_()

    def diagnostics(self) -> dict[str, Tensor]:
        """Return named values per query head (H,) for probes and reports, e.g. the step size."""
        return {}

    def prepare_for_inference(self, qk: FactorizedQK) -> PreparedQK | None:
        """Build the fused inference projection from the current parameters.

        Return None to use the regular forward. The default fuses both projections into one matmul, with a
        linear drift merged into the query projection. A coupling that is the identity is skipped.
        """
        drift = self.linear_drift()
        with torch.no_grad():
            query = (qk.q.weight, qk.q.bias) if drift is None else qk.drifted_query_projection(drift)
            weight, bias = stack_linear([query, (qk.k.weight, qk.k.bias)])
        if drift is not None or self.is_identity():
            return PreparedQK(self.head_shapes, weight, bias)
        return PreparedQK(self.head_shapes, weight, bias, lambda q, k, _: self(q, k))

    def extra_parameters(self) -> int:
        """Return the number of parameters this coupling adds to its layer, by formula."""
        return sum(parameter.numel() for parameter in self.parameters())

    def extra_flops(self) -> int:
        """Return the matmul FLOPs per token of one forward pass, by formula."""
        return 0


@dataclass(frozen=True)
class PreparedQK:
    """Query and key projection prepared for inference: one matmul, then `finish`.

    weight  (H·D + G·D + L, dim) gives queries, keys and L latents
    finish  maps q (B, T, H, D), k (B, T, G, D) and latents (B, T, L) to the coupled (q, k); None: no-op
    """

    head_shapes: HeadShapes
    weight: Tensor
    bias: Tensor | None
    finish: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    n_value_rows: int = 0

    def with_values(self, v: nn.Linear) -> PreparedQK:
        """Return the same with the value projection in the matmul."""
        weight, bias = stack_linear([(self.weight, self.bias), (v.weight, v.bias)])
        return replace(self, weight=weight, bias=bias, n_value_rows=v.out_features)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return coupled q, k and flat values (B, T, n_value_rows) of x (B, T, dim)."""
        return self.unpack(F.linear(x, self.weight, self.bias))

    def unpack(self, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Couple and split the output (B, T, rows) of the matmul."""
        shapes = self.head_shapes
        n_q, n_k = shapes.n_q * shapes.head_dim, shapes.n_k * shapes.head_dim
        sizes = (n_q, n_k, out.shape[-1] - n_q - n_k - self.n_value_rows, self.n_value_rows)
        q, k, latents, v = out.split_with_sizes(sizes, dim=-1)
        q = q.unflatten(-1, (shapes.n_q, shapes.head_dim))
        k = k.unflatten(-1, (shapes.n_k, shapes.head_dim))
        if self.finish is not None:
            q, k = self.finish(q, k, latents)
        return q, k, v


_REGISTRY: Registry[Coupling] = Registry("coupling", "qkflow.attention.couplings", "qkflow.couplings")
register = _REGISTRY.register
names = _REGISTRY.names
get = _REGISTRY.get
check = _REGISTRY.check
options = _REGISTRY.options


def build(spec: str | Spec, head_shapes: HeadShapes, factory_kwargs: FactoryKwargs | None = None) -> Coupling:
    """Build a coupling from its spec, e.g. "leapfrog:n=7"."""
    return _REGISTRY.build(spec, head_shapes, factory_kwargs or {})
