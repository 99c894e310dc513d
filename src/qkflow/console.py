"""Output of the commands: tables on stdout, progress and messages on stderr, JSON for programs."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class PipedConsole(Console):
    """Console that raises BrokenPipeError for a closed pipe, as `print` does, instead of exiting with 1."""

    def on_broken_pipe(self) -> None:
        raise


out = PipedConsole()  # results
err = PipedConsole(stderr=True)  # progress and warnings: never mixed into --json


def progress_bar(*extra: TextColumn) -> Progress:
    """Return a progress bar on stderr with count, elapsed and remaining time."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),  # a path may contain brackets
        BarColumn(),
        MofNCompleteColumn(),
        *extra,
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=err,
        transient=True,
    )


def emit_json(value: Any) -> None:
    """Print one JSON object, the complete output of a command with --json."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")  # an error prints nothing
