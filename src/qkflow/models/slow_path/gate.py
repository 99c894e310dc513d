"""The gate through which the slow path speaks to the fast one."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from qkflow.attention.init import ParamSampler
from qkflow.errors import InputError, unknown


class Gate(nn.Module):
    """x ← x + g ⊙ ũ: adds what the slow path says, times a learnt g that begins at `start`.

    scalar  one g for all channels
    vector  one g a channel
    tanh    one g = tanh(a), which cannot leave (−1, 1) (Alayrac et al. 2022, arXiv 2204.14198)

    At g = 0 the model starts as the fast path alone, and the slow weights get no gradient on the first step.
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
            raise InputError(f"a {kind} gate must start {limits}, not at {init_value:g}")

    def reset_parameters(self) -> None:
        nn.init.constant_(
            self.weight, math.atanh(self.init_value) if self.kind == "tanh" else self.init_value
        )

    def init_parameters(self, sampler: ParamSampler) -> None:
        self.reset_parameters()

    @property
    def value(self) -> Tensor:
        """g, of shape (1,) or (width,)."""
        return self.weight.tanh() if self.kind == "tanh" else self.weight

    def forward(self, x: Tensor, u: Tensor) -> Tensor:
        return x + self.value * u

    def extra_repr(self) -> str:
        return f"{self.kind}, start={self.init_value:g}"
