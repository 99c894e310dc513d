"""Custom attention functions in `transformers` models.

`transformers` looks up the mask of a custom attention under the same name. Without one it passes no mask, so
a decoder attends to future tokens without a warning. `register_attention` therefore registers both together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qkflow.errors import InputError, unknown


def register_attention(name: str, function: Callable[..., Any], *, mask: str | Callable[..., Any]) -> None:
    """Register `attn_implementation=name` together with its mask.

    mask    a function that builds the mask, or the name of a registered attention whose mask fits, e.g.
            "sdpa" (True where a key may be attended to) or "eager" (added to the scores)
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    masks = AttentionMaskInterface()
    if isinstance(mask, str):
        if mask not in masks:
            raise unknown("mask", mask, masks.valid_keys())
        mask = masks[mask]
    if not callable(function) or not callable(mask):
        raise InputError(
            f"attention '{name}' needs a callable function and a callable mask", code="not-callable"
        )
    AttentionMaskInterface.register(name, mask)
    AttentionInterface.register(name, function)
