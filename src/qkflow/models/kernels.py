"""Norm and feed-forward gate with fewer passes over memory, where PyTorch has no fused kernel for them.

Composed of ordinary operations, autograd walks over the wide activations once per operation and keeps every
intermediate. Written out by hand, each needs its inputs alone for the backward pass, and half the passes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkflow.autograd import CustomFunction


class RMSNorm(nn.RMSNorm):
    """x / √(mean(x²) + ε) ⊙ w over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    exact = x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64)
    if exact and x.device.type in ("cpu", "meta"):
        out: Tensor = _RMSNorm.call(x, weight, eps)
        return out
    return _RMSNorm.composite(x, weight, eps)


class _RMSNorm(CustomFunction):
    """With r = 1/√(mean(x²) + ε): dx = r·(g⊙w − x·r²·⟨g⊙w, x⟩/D) and dw = Σ r·(g⊙x)."""

    @staticmethod
    def composite(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        size = x.shape[-1]
        r = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(size).add_(eps).rsqrt_()
        return torch.mul(x, r).mul_(weight), r

    @staticmethod
    def gradients(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, weight, _, r = ctx.saved_tensors
        grad, size = grads[0], x.shape[-1]
        product = (grad * x).reshape(-1, size)
        grad_weight = torch.mv(product.t(), r.reshape(-1))
        dot = torch.mv(product, weight).reshape(r.shape)
        pull = dot.mul_(r).mul_(r).div_(-size)
        room = product.view(x.shape)  # its numbers have been used
        return torch.mul(grad, weight, out=room).addcmul_(x, pull).mul_(r), grad_weight, None


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) ⊙ up, keeping only the two inputs: silu is cheaper to repeat than to store."""
    out: Tensor = _SwiGLU.call(gate, up)
    return out


class _SwiGLU(CustomFunction):
    """With σ = sigmoid(gate) and a = gate·σ, the gradient of a with respect to gate is σ − a·σ + a."""

    @staticmethod
    def composite(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    @staticmethod
    def forward(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate).mul_(up)

    @staticmethod
    def gradients(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (gate, up), grad = ctx.saved_tensors, grads[0]
        slope = torch.sigmoid(gate)
        a = gate * slope
        slope.addcmul_(a, slope, value=-1).add_(a)
        return slope.mul_(up).mul_(grad), a.mul_(grad)
