"""The learned gate g that scales the slow path's output before it is added to the residual stream."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from qkflow.attention.init import ParamSampler
from qkflow.errors import InputError, unknown


class Gate(nn.Module):
    """x ← x + g ⊙ ũ for x, ũ (B, T, C), with a learned g initialized to `init_value`.

    scalar  one g for all channels
    vector  one g per channel
    tanh    one g = tanh(a), bounded by (−1, 1) (Alayrac et al. 2022, arXiv 2204.14198)

    With `init_value` 0 the model equals the fast path at init, and the slow weights have zero gradient on the
    first step.
    """

    roles: ClassVar[dict[str, str]] = {"weight": "gate"}
    KINDS: ClassVar[tuple[str, ...]] = ("scalar", "vector", "tanh")

    def __init__(
        self, dim: int, kind: str = "scalar", init_value: float = 0.0, **factory_kwargs: Any
    ) -> None:
        super().__init__()
        self.check(kind, init_value)
        self.kind, self.init_value = kind, init_value
        self.weight = nn.Parameter(torch.empty(dim if kind == "vector" else 1, **factory_kwargs))
        self.reset_parameters()

    @classmethod
    def check(cls, kind: str, init_value: float) -> None:
        if kind not in cls.KINDS:
            raise unknown("gate", kind, cls.KINDS)
        if not math.isfinite(init_value) or (kind == "tanh" and abs(init_value) >= 1):
            limits = "inside (-1, 1)" if kind == "tanh" else "a finite number"
            raise InputError(
                f"gate_init of a {kind} gate must be {limits}, not {init_value:g}", code="invalid-gate-init"
            )

    def reset_parameters(self) -> None:
        nn.init.constant_(
            self.weight, math.atanh(self.init_value) if self.kind == "tanh" else self.init_value
        )

    def init_parameters(self, sampler: ParamSampler) -> None:
        self.reset_parameters()

    @property
    def value(self) -> Tensor:
        """g of shape (1,), or (C,) for a vector gate."""
        return self.weight.tanh() if self.kind == "tanh" else self.weight

    def forward(self, x: Tensor, u: Tensor) -> Tensor:
        return x + self.value * u

    def extra_repr(self) -> str:
        return f"{self.kind}, init_value={self.init_value:g}"
