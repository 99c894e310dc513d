"""What commands show: progress and tables for people on stderr/stdout, one JSON object for programs."""

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

out = Console()  # results
err = Console(stderr=True)  # progress, notes, warnings: never mixed into --json


def progress_bar(*extra: TextColumn) -> Progress:
    """The project's one progress bar: what, how far, elapsed, time left; on stderr."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),  # it may name a path with brackets in it
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
    """Print one JSON object, the whole output of a command run with --json."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")  # the whole of it, or nothing
