"""The live table of a running study: all runs, and the time left."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from qkflow.console import err

if TYPE_CHECKING:
    from qkflow.studies.runner.execution import RunStatus, RunTracker

_STATUS_STYLES: dict[RunStatus, str] = {
    "running": "cyan",
    "finished": "green",
    "reused": "green",
    "failed": "bold red",
    "interrupted": "yellow",
    "waiting": "dim",
}
# Which rows are kept when the table is longer than the terminal.
_STATUS_PRIORITY: tuple[RunStatus, ...] = (
    "running",
    "failed",
    "interrupted",
    "finished",
    "waiting",
    "reused",
)


def format_duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class LiveTable:
    """A live table on a terminal; elsewhere one line per run that ends."""

    def __init__(self, title: str, trackers: Sequence[RunTracker]) -> None:
        self.title, self.trackers = title, trackers
        self._start_time = time.monotonic()
        self._initial_tokens = sum(run.tokens for run in trackers)
        self._announced: set[str] = {run.spec.id for run in trackers if run.status == "reused"}
        self._live = Live(console=err, refresh_per_second=2, transient=True) if err.is_terminal else None

    def __enter__(self) -> LiveTable:
        if self._live:
            self._live.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.__exit__(exc_type, exc_value, traceback)

    def time_left(self) -> float | None:
        """Return the seconds for the remaining tokens, at the speed so far (with start-up and evaluation)."""
        done = sum(run.tokens for run in self.trackers) - self._initial_tokens
        left = sum(max(0, run.spec.tokens - run.tokens) for run in self.trackers if not run.is_done)
        elapsed = time.monotonic() - self._start_time
        if left == 0:
            return 0.0
        return left * elapsed / done if done > 0 else None

    def refresh(self) -> None:
        if self._live:
            self._live.update(self._render())
        for run in self.trackers:
            if run.is_done and run.spec.id not in self._announced:
                self._announced.add(run.spec.id)
                self._announce(run)

    def _announce(self, tracker: RunTracker) -> None:
        """Print a permanent line: for a run that did not finish always, else only without a live table."""
        count = Counter(r.is_done for r in self.trackers)[True]
        name = f"{tracker.spec.cell} seed {tracker.spec.seed}"
        if tracker.status == "finished":
            if not self._live:
                loss = "" if tracker.loss is None else f", loss {tracker.loss:.4f}"
                left = format_duration(self.time_left())
                err.print(
                    f"{count}/{len(self.trackers)} {name} finished{loss}, about {left} left",
                    markup=False,
                    soft_wrap=True,
                )
        else:
            line = f"{count}/{len(self.trackers)} {name} {tracker.status}: {tracker.message}"
            err.print(line, markup=False, style="red", soft_wrap=True)

    def _render(self) -> Group:
        table = Table(title=self.title, title_justify="left", expand=False)
        for name in ("run", "seed", "lr", "status", "step", "loss", "tokens/s", "left"):
            table.add_column(name, justify="left" if name in ("run", "status") else "right", no_wrap=True)
        max_rows = max(4, err.height - 8)
        shown = sorted(self.trackers, key=lambda run: _STATUS_PRIORITY.index(run.status))[:max_rows]
        for run in self.trackers:
            if run in shown:
                table.add_row(
                    run.spec.cell,
                    str(run.spec.seed),
                    f"{run.spec.lr:g}",
                    Text(run.status, _STATUS_STYLES[run.status]),
                    f"{run.step}/{run.spec.steps}",
                    "–" if run.loss is None else f"{run.loss:.3f}",
                    "–" if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}",
                    format_duration(run.time_left()) if run.status == "running" else "",
                )
        counts = Counter(run.status for run in self.trackers)
        summary = ", ".join(f"{counts[status]} {status}" for status in _STATUS_PRIORITY if counts[status])
        elapsed = format_duration(time.monotonic() - self._start_time)
        return Group(
            table, Text(f"{summary} · {elapsed} elapsed, about {format_duration(self.time_left())} left")
        )
