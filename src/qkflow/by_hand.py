"""Operations whose gradients are written by hand."""

from __future__ import annotations

import inspect
from typing import Any

import torch


class ByHand(torch.autograd.Function):
    """A function that costs its forward pass alone where no gradient is wanted.

    `apply` takes tens of microseconds before anything is computed, which a model that writes one token at a
    time would feel in every layer. Subclasses keep `forward` free of the context, which `setup_context` gets.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # `apply` asks for it each time, and working it out takes longer than all else that `apply` does
        cls.forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]

    @classmethod
    def call(cls, *inputs: Any) -> Any:
        return cls.apply(*inputs) if torch.is_grad_enabled() else cls.forward(*inputs)
