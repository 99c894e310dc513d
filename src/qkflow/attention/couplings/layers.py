"""Building blocks of couplings: step sizes, networks per head, and operations on grouped heads.

Grouped heads (GQA): every query of a group uses the group's key; the key uses the group's mean force.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkflow.attention.couplings.base import FactoryKwargs
from qkflow.attention.init import ParamSampler, copy_into
from qkflow.errors import InputError


class StepSize(nn.Module):
    """Δ: one per query head, or one per layer; learned or fixed."""

    def __init__(
        self, n_heads: int, init_value: float, learned: bool, per: str, factory_kwargs: FactoryKwargs
    ) -> None:
        super().__init__()
        if not math.isfinite(init_value):
            raise InputError(f"step must be a finite number, not {init_value}", code="step-not-finite")
        if per not in ("head", "layer"):
            raise InputError(f"step_per must be 'head' or 'layer', not '{per}'", code="unknown-step-per")
        self.n_heads = n_heads
        self.init_value = init_value
        value = torch.full((n_heads if per == "head" else 1,), float(init_value), **factory_kwargs)
        if learned:
            self.value = nn.Parameter(value)
        else:
            self.register_buffer("value", value)

    def per_head(self) -> Tensor:
        """Return Δ of every query head (H,)."""
        return self.value.expand(self.n_heads)

    def init_parameters(self, sampler: ParamSampler) -> None:
        nn.init.constant_(self.value, self.init_value)


@dataclass(frozen=True)
class LowRankForce:
    """f(q) = W2·σ(W1·q + b1) + b2 of every query head.

    W1 (H, r, D), W2 (H, D, r), b1 (H, r) or None, b2 (H, D) or None
    """

    w1: Tensor
    w2: Tensor
    b1: Tensor | None = None
    b2: Tensor | None = None
    activation: Literal["silu", "sigmoid"] = "silu"


class HeadNetworks(nn.Module):
    """f(x) = W2·silu(W1·x + b1) + b2, one network per head or one shared by all heads.

    W1 is (H, r, D) and W2 is (H, out_dim, r), so that all heads run as one batched matmul.
    """

    def __init__(
        self,
        n_heads: int,
        head_dim: int,
        hidden_dim: int,
        factory_kwargs: FactoryKwargs,
        *,
        out_dim: int | None = None,
        shared: bool = False,
        bias: bool = False,
        zero_output: bool = False,
    ) -> None:
        super().__init__()
        check_hidden_dim(hidden_dim)
        count, out_dim = 1 if shared else n_heads, out_dim or head_dim
        self.n_heads, self.hidden_dim, self.zero_output = n_heads, hidden_dim, zero_output
        self.w1 = nn.Parameter(torch.empty(count, hidden_dim, head_dim, **factory_kwargs))
        self.w2 = nn.Parameter(torch.empty(count, out_dim, hidden_dim, **factory_kwargs))
        self.b1 = nn.Parameter(torch.empty(count, hidden_dim, **factory_kwargs)) if bias else None
        self.b2 = nn.Parameter(torch.empty(count, out_dim, **factory_kwargs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return f(x) (B, T, H, out_dim) of x (B, T, H, D), in the textbook form."""
        u = torch.einsum("bthd,hrd->bthr", x, self.per_head(self.w1))
        if self.b1 is not None:
            u = u + self.b1
        y = torch.einsum("bthr,hor->btho", F.silu(u), self.per_head(self.w2))
        return y if self.b2 is None else y + self.b2

    def per_head(self, parameter: Tensor) -> Tensor:
        """Expand a shared parameter to one per head."""
        return parameter.expand(self.n_heads, *parameter.shape[1:])

    def as_force(self) -> LowRankForce:
        """Return the networks of all heads in factorized form."""
        b1, b2 = (None if bias is None else self.per_head(bias) for bias in (self.b1, self.b2))
        return LowRankForce(self.per_head(self.w1), self.per_head(self.w2), b1, b2)

    def init_parameters(self, sampler: ParamSampler) -> None:
        copy_into(self.w1, sampler.matrix("w1", self.w1.shape, self.w1.shape[-1]))
        if self.zero_output:
            nn.init.zeros_(self.w2)
        else:
            copy_into(self.w2, sampler.matrix("w2", self.w2.shape, self.hidden_dim))
        for bias in (self.b1, self.b2):
            if bias is not None:
                nn.init.zeros_(bias)


def repeat_keys(k: Tensor, group_size: int) -> Tensor:
    """Repeat every key for the queries of its group: (B, T, G, D) -> (B, T, H, D)."""
    return k if group_size == 1 else k.repeat_interleave(group_size, dim=2)


def group_mean(force: Tensor, group_size: int) -> Tensor:
    """Average over the query heads of each group: (B, T, H, D) -> (B, T, G, D)."""
    return force if group_size == 1 else force.unflatten(2, (-1, group_size)).mean(dim=3)


def add_drift(q: Tensor, k: Tensor, drift: Tensor) -> Tensor:
    """Return q + drift_h·k, with one drift per query head."""
    group_size, drift = q.shape[2] // k.shape[2], drift.to(q.dtype)
    if group_size == 1:
        return torch.addcmul(q, k, drift[:, None])
    grouped = q.unflatten(2, (-1, group_size))
    return torch.addcmul(grouped, k.unsqueeze(3), drift.view(-1, group_size, 1)).flatten(2, 3)


def heads_first(x: Tensor) -> Tensor:
    """Transpose (B, T, H, D) to (H, B·T, D), a view where x is contiguous."""
    return x.flatten(0, 1).transpose(0, 1)


def tokens_first(x: Tensor, batch_and_length: torch.Size) -> Tensor:
    """Transpose (H, B·T, D) back to (B, T, H, D), a view."""
    return x.transpose(0, 1).unflatten(0, batch_and_length)


def check_steps(steps: int) -> int:
    """Return `steps`; raise unless it is an integer of at least 1."""
    if not isinstance(steps, int) or steps < 1:
        raise InputError(f"steps must be an integer of at least 1, not {steps}", code="bad-steps")
    return steps


def check_hidden_dim(hidden_dim: int) -> None:
    if hidden_dim < 1:
        raise InputError(f"hidden_dim must be at least 1, not {hidden_dim}", code="bad-hidden-dim")
