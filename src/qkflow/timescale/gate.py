"""The gate through which the slow path speaks to the fast one: x ← x + g ⊙ ũ."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from qkflow.errors import InputError, unknown


class Gate(nn.Module):
    """Multiplies what the slow path says by a learnt g, at first `start`.

    scalar  one g for all channels
    vector  one g a channel
    tanh    one g = tanh(a), which cannot leave (−1, 1) (Alayrac et al. 2022, arXiv 2204.14198)

    At g = 0 the model starts as the fast path alone, and the slow weights get no gradient on the first step.
    """

    role: ClassVar[str] = "gate"
    KINDS: ClassVar[tuple[str, ...]] = ("scalar", "vector", "tanh")

    def __init__(self, width: int, kind: str = "scalar", start: float = 0.0) -> None:
        super().__init__()
        if kind not in self.KINDS:
            raise unknown("gate", kind, self.KINDS)
        if not math.isfinite(start) or (kind == "tanh" and abs(start) >= 1):
            limits = "inside (-1, 1)" if kind == "tanh" else "a finite number"
            raise InputError(f"a {kind} gate must start {limits}, not at {start:g}")
        self.kind, self.start = kind, start
        self.weight = nn.Parameter(torch.empty(width if kind == "vector" else 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, math.atanh(self.start) if self.kind == "tanh" else self.start)

    @property
    def value(self) -> Tensor:
        """g, of shape (1,) or (width,)."""
        return self.weight.tanh() if self.kind == "tanh" else self.weight

    def forward(self, u: Tensor) -> Tensor:
        return self.value * u

    def extra_repr(self) -> str:
        return f"{self.kind}, start={self.start:g}"
