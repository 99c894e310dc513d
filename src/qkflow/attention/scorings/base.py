"""The contract of a scoring, and the registry of all of them.

Shapes: q (B, T, H, D), k (B, S, G, D), v (B, S, Gv, Dv); the output is (B, T, n_out, out_head_dim).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkflow.attention.masks import Mask
from qkflow.attention.projections import HeadShapes, is_autocast_enabled
from qkflow.attention.registry import Registry, Spec

FactoryKwargs = dict[str, Any]


class Scoring(nn.Module):
    """A map of rotated queries and keys, and of values, to the output of the heads."""

    name: ClassVar[str]
    equation: ClassVar[str]
    citation: ClassVar[str]
    good_for: ClassVar[str]
    aliases: ClassVar[dict[str, str]] = {}

    @staticmethod
    def head_shapes(n_heads: int, n_kv_heads: int, head_dim: int) -> HeadShapes:
        """Return the head shapes this scoring needs instead of `n_heads` standard heads of `head_dim`."""
        raise NotImplementedError

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, dropout: float, x: Tensor
    ) -> Tensor:
        """Return (B, T, n_out, out_head_dim) through the fused kernel; `x` is the input of the layer."""
        raise NotImplementedError

    def reference(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the attention weights (B, n_out, T, S) in the textbook form."""
        raise NotImplementedError

    def extra_parameters(self) -> int:
        """Return the number of parameters of this scoring, without the projections."""
        return 0


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, dropout: float) -> Tensor:
    """Call `scaled_dot_product_attention` on (B, T, H, D) tensors; contiguous groups share a key head.

    Under autocast on a CPU it runs in float32: the backward of PyTorch's fused CPU kernel takes three times
    as long in bfloat16.
    """
    in_float32 = q.device.type == "cpu" and is_autocast_enabled(q)
    if in_float32:
        q, k, v = q.float(), k.float(), v.float()
    with torch.autocast("cpu", enabled=False) if in_float32 else nullcontext():
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask.allowed,
            dropout_p=dropout,
            is_causal=mask.causal,
            scale=scale,
            enable_gqa=q.shape[2] != k.shape[2] or q.shape[2] != v.shape[2],
        )
    return out.transpose(1, 2)


def attention_weights(q: Tensor, k: Tensor, mask: Mask, scale: float) -> Tensor:
    """Return softmax(scale·q·kᵀ) over the unmasked keys: (B, H, T, S)."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
    visible = mask.to_bool(q.shape[1], k.shape[1], q.device)
    return scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)


def weighted_sum(weight: Tensor, v: Tensor) -> Tensor:
    """Return weights (B, H, T, S) times values (B, S, Gv, Dv): (B, T, H, Dv)."""
    v = v.repeat_interleave(weight.shape[1] // v.shape[2], dim=2)
    return torch.einsum("bhts,bshd->bthd", weight, v)


_REGISTRY: Registry[Scoring] = Registry("scoring", "qkflow.attention.scorings", "qkflow.scorings")
register = _REGISTRY.register
names = _REGISTRY.names
get = _REGISTRY.get
check = _REGISTRY.check


def build(
    spec: str | Spec,
    head_shapes: HeadShapes,
    dim: int,
    layer_idx: int,
    factory_kwargs: FactoryKwargs | None = None,
) -> Scoring:
    """Build a scoring from its spec."""
    return _REGISTRY.build(spec, head_shapes, dim, layer_idx, factory_kwargs or {})
