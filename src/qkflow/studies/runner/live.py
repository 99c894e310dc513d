"""What is seen of a study while it runs: one table of all runs, and when it will be done."""

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
    from qkflow.studies.runner.execution import Watched

_STYLE = {
    "running": "cyan",
    "finished": "green",
    "reused": "green",
    "failed": "bold red",
    "interrupted": "yellow",
    "waiting": "dim",
}
# Of a table too long for the terminal the most telling rows stay.
_FIRST = ("running", "failed", "interrupted", "finished", "waiting", "reused")


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Board:
    """The live table on a terminal; one line per ended run where there is none."""

    def __init__(self, title: str, runs: Sequence[Watched]) -> None:
        self.title, self.runs = title, runs
        self._began = time.monotonic()
        self._tokens_before = sum(run.tokens for run in runs)
        self._told: set[str] = {run.run.id for run in runs if run.state == "reused"}
        self._live = Live(console=err, refresh_per_second=4, transient=True) if err.is_terminal else None

    def __enter__(self) -> Board:
        if self._live:
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.__exit__(kind, error, trace)

    def time_left(self) -> float | None:
        """Tokens still to train, at the pace so far (start-up and evaluation included)."""
        done = sum(run.tokens for run in self.runs) - self._tokens_before
        left = sum(max(0, run.run.tokens - run.tokens) for run in self.runs if not run.over)
        elapsed = time.monotonic() - self._began
        if left == 0:
            return 0.0
        return left * elapsed / done if done > 0 else None

    def show(self) -> None:
        if self._live:
            self._live.update(self._render())
        for run in self.runs:
            if run.over and run.run.id not in self._told:
                self._told.add(run.run.id)
                self._tell(run)

    def _tell(self, run: Watched) -> None:
        """A line that stays: always for a run that did not finish, else only where there is no live table."""
        count = Counter(r.over for r in self.runs)[True]
        what = f"{run.run.cell} seed {run.run.seed}"
        if run.state == "finished":
            if not self._live:
                loss = "" if run.loss is None else f", loss {run.loss:.4f}"
                left = duration(self.time_left())
                err.print(
                    f"{count}/{len(self.runs)} {what} finished{loss}, about {left} left",
                    markup=False,
                    soft_wrap=True,
                )
        else:
            said = f"{count}/{len(self.runs)} {what} {run.state}: {run.message}"
            err.print(said, markup=False, style="red", soft_wrap=True)

    def _render(self) -> Group:
        table = Table(title=self.title, title_justify="left", expand=False)
        for name in ("run", "seed", "lr", "state", "step", "loss", "tokens/s", "left"):
            table.add_column(name, justify="left" if name in ("run", "state") else "right", no_wrap=True)
        room = max(4, err.height - 8)
        shown = sorted(self.runs, key=lambda run: _FIRST.index(run.state))[:room]
        for run in self.runs:
            if run in shown:
                table.add_row(
                    run.run.cell,
                    str(run.run.seed),
                    f"{run.run.lr:g}",
                    Text(run.state, _STYLE[run.state]),
                    f"{run.step}/{run.run.steps}",
                    "–" if run.loss is None else f"{run.loss:.3f}",
                    "–" if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}",
                    duration(run.time_left()) if run.state == "running" else "",
                )
        states = Counter(run.state for run in self.runs)
        summary = ", ".join(f"{states[state]} {state}" for state in _FIRST if states[state])
        elapsed = duration(time.monotonic() - self._began)
        return Group(table, Text(f"{summary} · {elapsed} gone, about {duration(self.time_left())} left"))
