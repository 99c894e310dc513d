"""Stored results of ablations, and docs/ablation.md, which is rendered from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qkflow.bench.ablation import AblationRow
from qkflow.files import write_atomic, write_json
from qkflow.plain_data import read_json

HEADER = """# Ablations

A second implementation of anything (custom autograd function, packed weights, a cache) stays only if it makes
what a user runs at least 5% faster, or halves its memory. `qkflow bench --ablate` times each against the
plain implementation, interleaved in one process. `--save docs/results/ablation.json` stores the results and
renders this page from them.

- **time**, **memory**: plain / ours, so above 1 ours is better; time with a 95% interval
- **ms**: time of the plain implementation. `clock process` is the CPU time of all threads and child
  processes: `tokenizers` uses all cores, the word cache one
"""
COLUMNS = ("implementation", "case", "time", "95% interval", "memory", "ms", "meets the rule")
IN_USE = "## In use\n"
DELETED = """## Deleted

Measured before they were removed.
"""


def update_results(path: Path, rows: list[AblationRow], environment: dict[str, Any]) -> dict[str, Any]:
    """Store new rows in a results file. Rows of other implementations and of deleted ones stay."""
    results = read_json(path) if path.exists() else {"runs": []}
    names = {row.name for row in rows}
    runs = []
    for run in results["runs"]:
        remaining = [row for row in run["rows"] if run["status"] == "deleted" or row["name"] not in names]
        if remaining:
            runs.append({**run, "rows": remaining})
    new_run = {"status": "kept", "environment": environment, "rows": [row.to_dict() for row in rows]}
    results = {"runs": [new_run, *runs]}
    write_json(path, results)
    return results


def write_page(path: Path, results: dict[str, Any]) -> None:
    write_atomic(path, render_page(results).encode())


def render_page(results: dict[str, Any]) -> str:
    """Return the Markdown page of stored results."""
    lines = [HEADER]
    for status, heading in (("kept", IN_USE), ("deleted", DELETED)):
        lines.append(heading)
        for run in results["runs"]:
            if run["status"] == status:
                lines += [_describe(run["environment"]), _table(run["rows"])]
    return "\n".join(lines).rstrip() + "\n"


def _describe(environment: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in environment.items() if value is not None) + ".\n"


def _table(rows: list[dict[str, Any]]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        memory = "" if row["memory_ratio"] is None else f"{row['memory_ratio']:.2f}×"
        cells = (
            row["name"],
            row["case"],
            f"{row['ratio']:.3f}×",
            f"{row['low']:.3f}…{row['high']:.3f}",
            memory,
            f"{row['milliseconds']:.1f}",
            "yes" if row["verdict"] == "keep" else "no",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
