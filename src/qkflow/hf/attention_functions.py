"""Attention functions of one's own in `transformers` models.

`transformers` looks a custom attention's mask up by the same name, and where it finds none it passes no mask
at all: a decoder then sees the future, without a word. So the two are registered together here, or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qkflow.errors import InputError, unknown


def register_attention(name: str, function: Callable[..., Any], *, mask: str | Callable[..., Any]) -> None:
    """Make `attn_implementation=name` known, with the mask it needs.

    mask    what makes the mask: a function, or the name of a known attention whose mask fits, e.g. "sdpa"
            (True where a key may be seen) or "eager" (added to the scores)
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    masks = AttentionMaskInterface()
    if isinstance(mask, str):
        if mask not in masks:
            raise unknown("mask", mask, masks.valid_keys())
        mask = masks[mask]
    if not callable(function) or not callable(mask):
        raise InputError(f"attention '{name}' needs a function and a mask that can be called")
    AttentionMaskInterface.register(name, mask)
    AttentionInterface.register(name, function)
