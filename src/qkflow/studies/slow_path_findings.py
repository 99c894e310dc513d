"""What a comparison says of the slow path: does its gate open, what does opening pay, what does it cost?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qkflow.studies.stats import paired_difference, t_interval

if TYPE_CHECKING:
    from qkflow.studies.analysis import RunData
    from qkflow.studies.compare import Comparison

OPEN_GATE_THRESHOLD = (
    0.01  # a gate counts as open when what it lets through exceeds 1% of the stream it is added to
)

# what the difference of two variants of a study tells
CONTRASTS = {
    ("slow", "slow:closed"): "what the slow path brings",
    ("slow", "slow:frozen"): "what training the slow path brings",
    ("slow:warm-gate", "slow"): "what an open start brings",
    ("slow", "dense-matched"): "the slow path against the same compute at token rate",
}


def gate_findings(comparison: Comparison) -> dict[str, Any]:
    """`gates`: one row a variant with a slow path; `contrasts`: paired differences; `sentences`: in words."""
    confidence = comparison.summary["config"]["confidence"]
    by_cell: dict[str, dict[int, RunData]] = {}
    for run in comparison.runs:
        if run.phase == "compare" and run.loss is not None:
            by_cell.setdefault(run.cell, {})[run.seed] = run
    everyone = [comparison.summary["reference"], *comparison.summary["variants"]]
    rows = {row["variant"]: row for row in everyone if row}  # no reference where all its runs failed
    runs = {name: by_cell.get(row["cell"], {}) for name, row in rows.items()}
    gates = [found for name in rows if (found := _gate_row(name, list(runs[name].values()), confidence))]
    contrasts = []
    for (one, other), meaning in CONTRASTS.items():
        seeds = sorted(runs.get(one, {}).keys() & runs.get(other, {}).keys())
        if seeds:
            losses = [[_loss(runs[name][seed]) for seed in seeds] for name in (one, other)]
            difference = paired_difference(losses[0], losses[1], confidence).to_dict()
            contrasts.append({"variant": one, "against": other, "meaning": meaning, "difference": difference})
    sentences = [*map(_gate_sentence, gates), *map(_contrast_sentence, contrasts)]
    return {"gates": gates, "contrasts": contrasts, "sentences": sentences}


def _loss(run: RunData) -> float:
    assert run.loss is not None
    return run.loss


def _gate_row(name: str, runs: Sequence[RunData], confidence: float) -> dict[str, Any] | None:
    """|g| and ‖g⊙ũ‖/‖x‖ at the first and last look, the mean over gates, with an interval over seeds."""
    looks = [[row for row in run.metrics.get("probe", []) if row.get("slow_gate")] for run in runs]
    looks = [rows for rows in looks if rows]
    if not looks:
        return None
    row: dict[str, Any] = {"variant": name, "seeds": len(looks)}
    for measure in ("slow_gate", "slow_share"):
        for when, index in (("first", 0), ("last", -1)):
            values = np.array([np.mean(rows[index][measure]) for rows in looks])
            low, high, _ = t_interval(values, confidence)
            row[f"{measure}_{when}"] = {"mean": float(values.mean()), "low": low, "high": high}
    share = row["slow_share_last"]
    row["open"] = (share["low"] if share["low"] is not None else share["mean"]) > OPEN_GATE_THRESHOLD
    return row


def _gate_sentence(row: dict[str, Any]) -> str:
    gate, share = row["slow_gate_last"], row["slow_share_last"]
    state = "open" if row["open"] else "closed"
    return (
        f"{row['variant']}: the gate ends {state}, |g| = {_format_interval(gate, '{:.4f}')}; "
        f"what it lets through is {_format_interval(share, '{:.2%}')} of the stream"
    )


def _contrast_sentence(row: dict[str, Any]) -> str:
    d = row["difference"]
    percent = d["percent"]
    sure = d["low"] is not None and (d["low"] > 0 or d["high"] < 0)
    judged = ("pays" if d["mean"] < 0 else "hurts") if sure else "no evidence either way"
    return (
        f"{row['variant']} against {row['against']} ({row['meaning']}): perplexity "
        f"{_format_interval(percent, '{:+.2f}%')}, {judged}"
    )


def _format_interval(value: dict[str, Any], fmt: str) -> str:
    """Per cent of perplexity have no mean or no end where that is more than a number can hold."""
    mean, low, high = (
        "∞" if value[name] is None else fmt.format(value[name]) for name in ("mean", "low", "high")
    )
    return mean if value["low"] is None else f"{mean} [{low}, {high}]"
