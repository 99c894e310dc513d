"""Output of the commands: tables on stdout, progress and messages on stderr, JSON for programs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and line ends


def without_controls(text: str) -> str:
    """Escape control characters: text of a file could rename the window, or hide what is above it."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class PipedConsole(Console):
    """Console that raises BrokenPipeError for a closed pipe, as `print` does, instead of exiting with 1.

    Control characters in a text are escaped; colors and progress bars are not part of a text.
    """

    def on_broken_pipe(self) -> None:
        raise

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=without_controls(segment.text))


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
