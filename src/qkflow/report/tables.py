"""Tables of a study: CSV files, the terminal table, and the number formats that pages share."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qkflow.studies.design import Verdict
from qkflow.studies.results import StudySummary
from qkflow.studies.sentences import SCIENTIFIC_FROM, format_percent, format_signed

if TYPE_CHECKING:
    from rich.table import Table

    from qkflow.studies.blocked import BlockedDifference
    from qkflow.studies.run_data import RunData
    from qkflow.studies.stats import PairedDifference

_CURVE_COLUMNS = ("step", "tokens", "seconds", "flops", "loss", "perplexity", "bits_per_byte")
NARROW_WIDTH = 72  # columns of a terminal, below which the table has no costs
VERDICT_STYLES = {
    Verdict.HELPS: "bold green",
    Verdict.HURTS: "bold red",
    Verdict.EQUIVALENT: "bold cyan",
    Verdict.REFERENCE: "bold",
    Verdict.NO_VERDICT: "dim",
}


def summary_csv(summary: StudySummary) -> str:
    """Return one line per arm."""
    return to_csv(arm.to_row() for arm in summary.arms)


def curves_csv(runs: Sequence[RunData]) -> str:
    """Return one line per evaluation of every run."""
    return to_csv(
        {
            "run": run.id,
            "cell": run.cell,
            "seed": run.seed,
            "lr": run.lr,
            **{column: row.get(column) for column in _CURVE_COLUMNS},
        }
        for run in runs
        for row in run.metrics.get("eval", [])
    )


def to_csv(rows: Iterable[dict[str, Any]], columns: Sequence[str] = ()) -> str:
    """Return rows as CSV. The header is `columns`, or the keys of the first row."""
    rows = list(rows)
    text = io.StringIO()
    if rows or columns:
        writer = csv.DictWriter(text, fieldnames=columns or list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()


def format_number(value: float | None, format_spec: str = ".3f", missing: str = "–") -> str:
    """Format a number; a format that ends in × keeps it as the unit: `1.23×`."""
    unit = "×" if format_spec.endswith("×") else ""
    if value is None:
        return missing
    return format(value, format_spec.removesuffix("×") if abs(value) < SCIENTIFIC_FROM else ".3g") + unit


def format_difference(difference: PairedDifference | BlockedDifference | None) -> tuple[str, str]:
    """Return a difference in percent of perplexity, and its interval, as text."""
    percent = difference.percent if difference else {}
    mean, low, high = (percent.get(name) for name in ("mean", "low", "high"))
    if mean is None or low is None or high is None:
        return format_percent(mean), "–"
    return format_percent(mean), f"{format_signed(low)}…{format_signed(high)}"


def format_change(difference: PairedDifference | BlockedDifference | None) -> str:
    """Return a difference with its interval, e.g. `−1.2% (−2.0…−0.4)`."""
    mean, interval = format_difference(difference)
    return f"{mean} ({interval})"


def terminal_table(summary: StudySummary, width: int = 80) -> Table:
    """Return a table that fits 80 columns with names of usual length; without costs, it fits 40."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    is_narrow = width < NARROW_WIDTH
    by_bits = summary.metric == "bits per byte"
    names = ("variant", "bits/B" if by_bits else "ppl", "Δ", "interval", "tokens", "time", "step", "verdict")
    shown = (0, 2, 7) if is_narrow else range(len(names))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left")
    table.caption = f"Δ: {summary.metric} against the reference."
    table.caption += "" if is_narrow else " tokens, time: to reach its final loss."
    table.caption += " A/A: the reference against itself with other seeds." if summary.noise_floor else ""
    for i in shown:
        if names[i] == "variant":
            table.add_column(names[i], overflow="fold")
        else:
            table.add_column(names[i], justify="left" if names[i] == "verdict" else "right", no_wrap=True)

    def add_row(*cells: Text | str) -> None:
        table.add_row(*(cells[i] for i in shown))

    for arm in summary.arms:
        cost = arm.cost
        add_row(
            Text(arm.variant, "bold").append(f"\n{arm.best_init}", "dim not bold"),
            format_number(arm.bits_per_byte, ".3f") if by_bits else format_number(arm.perplexity, ".2f"),
            *format_difference(arm.difference),
            *(
                format_number(ratio, ".2f×")
                for ratio in (cost.tokens_to_target, cost.seconds_to_target, cost.step_time_ratio)
            ),
            Text(arm.verdict, VERDICT_STYLES.get(arm.verdict, "")),
        )
    if summary.noise_floor:
        floor = format_difference(summary.noise_floor.difference)
        add_row(Text("A/A", "dim"), "", *floor, "", "", "", Text("noise floor", "dim"))
    return table


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as a Markdown table; the first column is set as code."""
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = [format_cell(row[column]).replace("|", r"\|") for column in columns]
        lines.append("| " + " | ".join([f"`{cells[0]}`", *cells[1:]]) + " |")
    return "\n".join(lines)


def format_cell(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "–"
    return "null" if value is None else str(value)
