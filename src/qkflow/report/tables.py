"""A study's numbers as flat tables: dicts for data frames, CSV files, a table for the terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from qkflow.studies.analysis import RunData

_COST_COLUMNS = (
    "tokens_to_target",
    "seconds_to_target",
    "step_time_ratio",
    "tokens",
    "flops",
    "seconds",
    "step_seconds",
    "peak_memory_bytes",
    "parameters",
)
_SCIENTIFIC_FROM = 1e9  # from here on a number is shown by its first digits and its size
_CURVE_COLUMNS = ("step", "tokens", "seconds", "flops", "loss", "perplexity", "bits_per_byte")


def flat_row(row: dict[str, Any]) -> dict[str, Any]:
    """One variant as one flat row; the reference has no difference to itself."""
    difference = row["difference"] or {}
    percent = difference.get("percent") or {}
    variance = row["seed_variance_ratio"] or {}
    return {
        "variant": row["variant"],
        "role": row["role"],
        "verdict": row["verdict"],
        "best_init": row["best_init"],
        "lr": row["lr"],
        "seeds": len(row["seeds"]),
        "loss": row["loss"],
        "perplexity": row["perplexity"],
        "bits_per_byte": row["bits_per_byte"],
        "difference": difference.get("mean"),
        "low": difference.get("low"),
        "high": difference.get("high"),
        "bootstrap_low": difference.get("bootstrap_low"),
        "bootstrap_high": difference.get("bootstrap_high"),
        "p": difference.get("p"),
        "p_holm": difference.get("p_holm"),
        "percent": percent.get("mean"),
        "percent_low": percent.get("low"),
        "percent_high": percent.get("high"),
        "seed_variance_ratio": variance.get("ratio"),
        **{name: row[name] for name in _COST_COLUMNS},
        "sentence": row["sentence"],
    }


def all_rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """The reference, then every variant."""
    reference = summary["reference"]
    return [*([reference] if reference else []), *summary["variants"]]


def summary_csv(summary: dict[str, Any]) -> str:
    return to_csv(flat_row(row) for row in all_rows(summary))


def curves_csv(runs: Sequence[RunData]) -> str:
    """Every evaluation of every run."""
    return to_csv(
        {
            "run": run.id,
            "cell": run.cell,
            "seed": run.seed,
            "lr": run.lr,
            **{k: row.get(k) for k in _CURVE_COLUMNS},
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
    """`1.23` by format, `1.23×` where the format ends in ×; a dash where there is nothing."""
    unit = "×" if format_spec.endswith("×") else ""
    if value is None:
        return missing
    return format(value, format_spec.removesuffix("×") if abs(value) < _SCIENTIFIC_FROM else ".3g") + unit


def format_signed(value: float) -> str:
    """Per cent with its sign, a true minus, and as many digits as mean something."""
    if abs(value) >= _SCIENTIFIC_FROM:
        return f"{value:+.2g}"
    return (f"{value:+.1f}" if abs(value) >= 10 else f"{value:+.2f}").replace("-", "−")


def format_difference(row: dict[str, Any]) -> tuple[str, str]:
    """Difference in per cent of perplexity and its interval, as short text."""
    percent = (row["difference"] or {}).get("percent") or {}
    if percent.get("mean") is None:
        return "–", "–"
    low, high = percent["low"], percent["high"]
    inside = "–" if low is None or high is None else f"{format_signed(low)}…{format_signed(high)}"
    return f"{format_signed(percent['mean'])}%", inside


_VERDICT_STYLES = {"helps": "bold green", "hurts": "bold red", "reference": "bold", "no verdict": "dim"}


def terminal_table(summary: dict[str, Any]) -> Table:
    """Fits 80 columns with usual names; the sentences printed below it say the rest."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left")
    table.caption = "Δ: perplexity against the reference. tokens, time: to reach its final loss."
    table.add_column("variant", overflow="fold")
    for name in ("ppl", "Δ", "interval", "tokens", "time", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for row in all_rows(summary):
        table.add_row(
            Text(row["variant"], "bold").append(f"\n{row['best_init']}", "dim not bold"),
            format_number(row["perplexity"], ".2f"),
            *format_difference(row),
            *(
                format_number(row[name], ".2f×")
                for name in ("tokens_to_target", "seconds_to_target", "step_time_ratio")
            ),
            Text(row["verdict"], _VERDICT_STYLES.get(row["verdict"], "")),
        )
    return table
