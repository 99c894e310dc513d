"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), in the half-split layout of Llama."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from qkflow.autograd import CustomFunction
from qkflow.config_io import dataclass_from_dict
from qkflow.errors import InputError

# cos of each pair's angle for both of its members, and sin, negative for the first: (T, 1, D) or (B, T, 1, D)
Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class RotaryEmbedding:
    """Angles θ_i·t with θ_i = base^(−2i/D), optionally rescaled for longer contexts.

    scaling: `linear` divides every angle by `factor` (Chen et al. 2023); `ntk` raises the base so that
    the slowest angle is divided by `factor`; `llama3` divides only slow angles, blending between
    `original_length / low` and `original_length / high` (Llama 3.1).
    """

    base: float = 10_000.0
    scaling: Literal["none", "linear", "ntk", "llama3"] = "none"
    factor: float = 1.0
    original_max_position_embeddings: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        if self.base <= 0 or self.factor <= 0 or not math.isfinite(self.base * self.factor):
            raise InputError(f"rope base and factor must be positive, not {self.base} and {self.factor}")
        if self.scaling not in ("none", "linear", "ntk", "llama3"):
            raise InputError(f"unknown rope scaling '{self.scaling}': known: none, linear, ntk, llama3")

    def frequencies(self, head_dim: int, device: torch.device | None = None) -> Tensor:
        """θ_i for a head of `size`, in float64: angles at late positions need the digits."""
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
        """The turn of `positions` of shape (T,) or (B, T)."""
        theta = self.frequencies(head_dim, positions.device)
        angles = (positions.to(theta.dtype)[..., None] * theta).unsqueeze(-2)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    @classmethod
    def from_option(cls, value: RotaryEmbedding | dict[str, Any] | bool | None) -> RotaryEmbedding | None:
        """Read the `rope` option: true/false, a mapping of fields, or a `Rotary`."""
        if isinstance(value, RotaryEmbedding) or value is None:
            return value
        if isinstance(value, bool):
            return cls() if value else None
        return dataclass_from_dict(cls, value, "rope")


def check_head_dim(head_dim: int) -> None:
    if head_dim % 2:
        raise InputError(f"rope rotates pairs, so the head size must be even, not {head_dim}")


def apply_rope(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn each pair (x_i, x_{i+D/2}) of (B, T, H, D) by its angle."""
    out: Tensor = _Rotate.call(x, *rotation)
    return out


def apply_rope_reference(x: Tensor, rotation: Rotation) -> Tensor:
    cos, sin = rotation
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


def apply_rope_(x: Tensor, rotation: Rotation) -> None:
    """In place, where nothing is to be differentiated."""
    cos, sin = rotation
    other = x.roll(x.shape[-1] // 2, dims=-1).mul_(sin)
    x.mul_(cos).add_(other)


class _Rotate(CustomFunction):
    """Three passes over memory, and nothing of x kept for the backward pass."""

    @staticmethod
    def composite(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return apply_rope_reference(x, (cos, sin))

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return _rotate(x, cos, sin)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x.roll(x.shape[-1] // 2, dims=-1).mul_(sin).addcmul_(x, cos)
