"""A study as tables: for the terminal, and flat for CSV."""

from __future__ import annotations

import csv
import io
from typing import Any

from rich import box
from rich.table import Table

from qkflow.studies.pace.analysis import ATTRIBUTION_METHODS, MEASURES

TABLE_COLUMNS = (
    "performance",
    "mass",
    "confidence",
    "comprehensiveness",
    "sufficiency",
    "qk_scale",
    "ov_scale",
)
COLUMN_HEADINGS = {
    "performance": "test",
    "mass": "mass",
    "confidence": "AC",
    "comprehensiveness": "compr.",
    "sufficiency": "suff.",
    "qk_scale": "‖QK‖",
    "ov_scale": "‖OV‖",
}
_VERDICT_ARROWS = {"raises": "↑", "lowers": "↓"}


def format_cell(row: dict[str, Any], name: str) -> str:
    """A mean, and an arrow where it differs from the baseline's beyond chance."""
    entry = row["measures"].get(name)
    if entry is None:
        return "–"
    return f"{entry['mean']:.3f}{_VERDICT_ARROWS.get(entry.get('verdict', ''), '')}"


def published_cells(summary: dict[str, Any], faster: bool) -> list[str] | None:
    if summary["published"] is None:
        return None
    known = summary["published"]
    return [f"{known[name][faster]:.3f}" if name in known else "–" for name in TABLE_COLUMNS]


def results_table(summary: dict[str, Any]) -> Table:
    caption = (
        "means over seeds; ↑ ↓ differs from the baseline after Holm; mass: attention on the rationale; AC: "
        f"share of texts with mass above {summary['recipe']['threshold']:g}; compr., suff.: of the top "
        f"{summary['recipe']['ks'][0]:g}% tokens by rollout; published: Vashisht & Ramaswamy 2026"
    )
    table = Table(title=_title(summary), caption=caption, box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("r")
    for name in TABLE_COLUMNS:
        table.add_column(COLUMN_HEADINGS[name], justify="right", no_wrap=True)
    for row in summary["rows"]:
        table.add_row(row["ratio"], *(format_cell(row, name) for name in TABLE_COLUMNS))
    for faster, title in ((False, "published, same"), (True, "published, faster")):
        if (cells := published_cells(summary, faster)) is not None:
            table.add_row(title, *cells, style="dim")
    return table


def _title(summary: dict[str, Any]) -> str:
    question, facts = summary["config"], summary["facts"]
    chance = "" if facts["majority"] is None else f", commonest class {facts['majority']:.3f}"
    mode = "as published" if question["as_published"] else "single knob"
    return f"{question['task']}, {mode}: {facts['train']} texts, {facts['steps']} steps{chance}"


def attribution_table(summary: dict[str, Any]) -> Table:
    """Comprehensiveness by ranking: does any beat chance?"""
    caption = "mean comprehensiveness over the k; last: attention minus random with its 95% interval"
    table = Table(title="Does attention explain anything?", caption=caption, box=box.SIMPLE)
    table.add_column("r")
    for name in (*ATTRIBUTION_METHODS, "attention − random"):
        table.add_column(name, justify="right", no_wrap=True)
    over = {row["ratio"]: row["attention_random"] for row in summary["explains"]}
    for row in summary["rows"]:
        if row["deletions"]:
            cells = [f"{row['deletions'][source]['comprehensiveness']:.3f}" for source in ATTRIBUTION_METHODS]
            table.add_row(row["ratio"], *cells, format_interval(over[row["ratio"]]))
    return table


def format_interval(difference: dict[str, Any]) -> str:
    inside = "" if difference["low"] is None else f" ({difference['low']:+.3f}…{difference['high']:+.3f})"
    return f"{difference['mean']:+.3f}{inside}".replace("-", "−")


def summary_csv(summary: dict[str, Any]) -> str:
    """One line per ratio and measure."""
    text = io.StringIO()
    columns = ("ratio", "measure", "mean", "difference", "low", "high", "p", "p_holm", "verdict", "seeds")
    writer = csv.DictWriter(text, fieldnames=columns, lineterminator="\n")
    writer.writeheader()
    for row in summary["rows"]:
        for name in MEASURES:
            entry = row["measures"].get(name)
            if entry is None:
                continue
            difference = entry.get("difference", {})
            writer.writerow(
                {
                    "ratio": row["ratio"],
                    "measure": name,
                    "mean": entry["mean"],
                    "difference": difference.get("mean"),
                    **{key: difference.get(key) for key in ("low", "high", "p", "p_holm")},
                    "verdict": entry.get("verdict"),
                    "seeds": len(row["seeds"]),
                }
            )
    return text.getvalue()
