"""Mixin for modules that are prepared for inference from their current weights."""

from __future__ import annotations

from typing import Any, Self

from torch import nn


class PreparableModule(nn.Module):
    """A module that drops its inference preparation on `.train()`, when it is moved and when weights load."""

    def release_prepared(self) -> None:
        """Drop what `prepare_for_inference` built."""
        raise NotImplementedError

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
