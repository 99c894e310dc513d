"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), in the half-split layout of Llama."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from qkflow.config_io import dataclass_from_dict
from qkflow.errors import InputError, unknown

# cos and sin of the angle of each pair, sin negative for its first member: (T, 1, D) or (B, T, 1, D)
Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class RotaryEmbedding:
    """Angles θ_i·t with θ_i = base^(−2i/D), optionally rescaled for longer contexts.

    scaling: `linear` divides every angle by `factor` (Chen et al. 2023); `ntk` raises the base so that
    the slowest angle is divided by `factor`; `llama3` divides only slow angles, with a blend between
    `original_max_position_embeddings / low_freq_factor` and `… / high_freq_factor` (Llama 3.1).
    """

    base: float = 10_000.0
    scaling: Literal["none", "linear", "ntk", "llama3"] = "none"
    factor: float = 1.0
    original_max_position_embeddings: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        if self.base <= 0 or self.factor <= 0 or not math.isfinite(self.base * self.factor):
            raise InputError(
                f"rope base and factor must be positive, not {self.base} and {self.factor}", code="bad-rope"
            )
        if self.scaling not in ("none", "linear", "ntk", "llama3"):
            raise unknown("rope scaling", self.scaling, ("none", "linear", "ntk", "llama3"))

    def frequencies(self, head_dim: int, device: torch.device | None = None) -> Tensor:
        """Return θ_i in float64: angles at late positions need the precision."""
        check_head_dim(head_dim)
        base = self.base
        if self.scaling == "ntk":
            base *= self.factor ** (head_dim / max(head_dim - 2, 1))
        # MPS has no float64
        exact = torch.float32 if device is not None and device.type == "mps" else torch.float64
        theta = base ** (-torch.arange(0, head_dim, 2, dtype=exact, device=device) / head_dim)
        if self.scaling == "linear":
            theta = theta / self.factor
        if self.scaling == "llama3":
            turns = (
                self.original_max_position_embeddings * theta / (2 * math.pi)
            )  # full turns within the original length
            keep = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(
                0, 1
            )
            theta = keep * theta + (1 - keep) * theta / self.factor
        return theta

    def rotation(self, positions: Tensor, head_dim: int, dtype: torch.dtype) -> Rotation:
        """Return cos and sin for `positions` of shape (T,) or (B, T)."""
        theta = self.frequencies(head_dim, positions.device)
        angles = (positions.to(theta.dtype)[..., None] * theta).unsqueeze(-2)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    @classmethod
    def from_option(cls, value: RotaryEmbedding | dict[str, Any] | bool | None) -> RotaryEmbedding | None:
        """Parse the `rope` option: a bool, a mapping of fields, or a `RotaryEmbedding`."""
        if isinstance(value, RotaryEmbedding) or value is None:
            return value
        if isinstance(value, bool):
            return cls() if value else None
        return dataclass_from_dict(cls, value, "rope")


def check_head_dim(head_dim: int) -> None:
    if head_dim % 2:
        raise InputError(f"rope needs an even head_dim, not {head_dim}", code="odd-head-dim")


def apply_rope(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate each pair (x_i, x_{i+D/2}) of (B, T, H, D) by its angle."""
    cos, sin = rotation
    return torch.addcmul(x.roll(x.shape[-1] // 2, dims=-1) * sin, x, cos)
