"""Checks of the options and inputs of `Attention`."""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from qkflow.errors import InputError


def check_attention_shape(
    dim: int, n_heads: int, n_kv_heads: int, head_dim: int | None, window: int | None, dropout: float
) -> None:
    """Raise unless the sizes of an attention layer fit together."""
    if n_heads < 1 or n_kv_heads < 1 or dim < 1:
        raise InputError(
            f"dim {dim}, n_heads {n_heads} and n_kv_heads {n_kv_heads} must all be at least 1",
            code="bad-attention-size",
        )
    if head_dim is not None and head_dim < 1:
        raise InputError(f"head_dim must be at least 1, not {head_dim}", code="bad-head-dim")
    if head_dim is None and dim % n_heads:
        raise InputError(
            f"dim {dim} is not divisible by n_heads {n_heads}: change one of them, or set head_dim",
            code="dim-not-divisible",
        )
    if n_heads % n_kv_heads:
        raise InputError(
            f"n_heads {n_heads} is not divisible by n_kv_heads {n_kv_heads}", code="heads-not-divisible"
        )
    if window is not None and window < 1:
        raise InputError(f"window must be at least 1, not {window}", code="bad-window")
    if not 0 <= dropout < 1:
        raise InputError(f"dropout must be in [0, 1), not {dropout}", code="bad-dropout")


def check_qk_norm_gain(gain: float | Literal["learned"], qk_norm: bool) -> None:
    """Raise unless the gain is `learned`, or a number above zero with qk_norm."""
    if gain == "learned":
        return
    if not isinstance(gain, int | float) or not 0 < gain < math.inf:
        raise InputError(
            f"qk_norm_gain must be 'learned' or a number above zero, not {gain!r}", code="bad-qk-norm-gain"
        )
    if not qk_norm:
        raise InputError(
            f"qk_norm_gain {gain} needs query-key norms: use qk_norm=True", code="qk-norm-gain-without-norm"
        )


def check_collapsed_circuit(circuit: str, *, rope: bool, scoring: str, qk_norm: bool) -> None:
    """Raise for options that need separate projections."""
    if circuit.startswith("CA") and rope:
        raise InputError(
            f"circuit '{circuit}' has no separate query and key to rotate: use rope=False",
            code="collapsed-circuit-rope",
        )
    if scoring != "softmax":
        raise InputError(
            f"collapsed circuit '{circuit}' needs softmax scoring, not '{scoring}'",
            code="collapsed-circuit-scoring",
        )
    if circuit.startswith("CA") and qk_norm:
        raise InputError(
            f"circuit '{circuit}' has no separate query and key to normalize: use qk_norm=False",
            code="collapsed-circuit-qk-norm",
        )


def check_attention_input(
    x: Tensor, context: Tensor | None, *, dim: int, coupling: str, causal: bool, rope: bool
) -> None:
    """Raise unless x and context (B, T, dim) suit the layer."""
    for name, tensor in (("x", x), ("context", context)):
        if tensor is not None and (tensor.dim() != 3 or tensor.shape[-1] != dim):
            raise InputError(
                f"{name} must have the shape (batch, tokens, {dim}), not {tuple(tensor.shape)}",
                code="attention-input-shape",
            )
    if context is None:
        return
    if context.shape[0] != x.shape[0]:
        raise InputError(
            f"context has batch size {context.shape[0]}, but x has {x.shape[0]}", code="context-batch-size"
        )
    if coupling != "none":
        raise InputError(
            f"coupling '{coupling}' cannot be used in cross-attention, where no token has both a query and a "
            "key: use coupling='none'",
            code="coupling-cross-attention",
        )
    if causal or rope:
        raise InputError(
            "cross-attention has no shared positions: use causal=False and rope=False",
            code="cross-attention-positions",
        )
