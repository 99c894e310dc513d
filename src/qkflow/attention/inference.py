"""Inference: the mixin of modules that can be prepared for it, and eval mode as a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from torch import nn

from qkflow.errors import InputError


class PreparableModule(nn.Module):
    """A module that drops its inference preparation on `.train()`, when it is moved and when weights load."""

    def release_prepared(self) -> None:
        """Drop what `prepare_for_inference` built."""
        raise NotImplementedError

    def check_eval_mode(self) -> None:
        """Raise in training mode: an optimizer step would leave the prepared weights stale."""
        if self.training:
            raise InputError(
                "prepare_for_inference() needs eval mode: call .eval() first", code="not-in-eval-mode"
            )

    def train(self, mode: bool = True) -> Self:
        if mode:
            self.release_prepared()
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.release_prepared()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.release_prepared()
        super()._load_from_state_dict(*args, **kwargs)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode for the duration of the block, then restore the mode of every module."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
