"""Training callbacks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import Tensor

from qkflow.errors import printable

if TYPE_CHECKING:
    from qkflow.training.loop import Trainer


class Callback:
    """Hooks of a run. Every hook does nothing by default."""

    def on_start(self, trainer: Trainer) -> None: ...
    def on_step(self, trainer: Trainer, loss: Tensor) -> None: ...
    def on_metrics(self, row: dict[str, Any]) -> None: ...
    def on_message(self, message: str) -> None: ...


class StderrCallback(Callback):
    """Print messages (warnings, resumes) to stderr."""

    def on_message(self, message: str) -> None:
        print(f"qkflow: {printable(message)}", file=sys.stderr, flush=True)
