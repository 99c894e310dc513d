"""Findings of a comparison about the slow path: gate values and paired differences of its ablations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qkflow.studies.stats import paired_difference, t_interval

if TYPE_CHECKING:
    from qkflow.studies.compare import Comparison
    from qkflow.studies.run_data import RunData

OPEN_GATE_THRESHOLD = 0.01  # a gate counts as open if ‖g⊙ũ‖/‖x‖ exceeds 1%

# (variant, compared with): the effect that their difference estimates
CONTRASTS = {
    ("slow", "slow:closed"): "effect of the slow path",
    ("slow", "slow:frozen"): "effect of training the slow path",
    ("slow:warm-gate", "slow"): "effect of an open gate at init",
    ("slow", "dense-matched"): "slow path against the same compute at token rate",
}


def gate_findings(comparison: Comparison) -> dict[str, Any]:
    """Return `gates` (a row per slow path variant), `contrasts` (paired differences) and `sentences`."""
    confidence = comparison.summary.config.confidence
    by_cell: dict[str, dict[int, RunData]] = {}
    for run in comparison.runs:
        if run.phase == "compare" and run.loss is not None:
            by_cell.setdefault(run.cell, {})[run.seed] = run
    runs = {arm.variant: by_cell.get(arm.cell, {}) for arm in comparison.summary.arms}
    gates = [row for name in runs if (row := _gate_row(name, list(runs[name].values()), confidence))]
    contrasts = []
    for (variant, against), meaning in CONTRASTS.items():
        seeds = sorted(runs.get(variant, {}).keys() & runs.get(against, {}).keys())
        if seeds:
            losses = [[_loss(runs[name][seed]) for seed in seeds] for name in (variant, against)]
            difference = paired_difference(losses[0], losses[1], confidence).to_dict()
            contrasts.append(
                {"variant": variant, "against": against, "meaning": meaning, "difference": difference}
            )
    sentences = [*map(_gate_sentence, gates), *map(_contrast_sentence, contrasts)]
    return {"gates": gates, "contrasts": contrasts, "sentences": sentences}


def _loss(run: RunData) -> float:
    assert run.loss is not None
    return run.loss


def _gate_row(name: str, runs: Sequence[RunData], confidence: float) -> dict[str, Any] | None:
    """Return |g| and ‖g⊙ũ‖/‖x‖ of the first and last probe: mean over gates, interval over seeds."""
    probes = [[row for row in run.metrics.get("probe", []) if row.get("slow_gate")] for run in runs]
    probes = [rows for rows in probes if rows]
    if not probes:
        return None
    row: dict[str, Any] = {"variant": name, "seeds": len(probes)}
    for measure in ("slow_gate", "slow_share"):
        for when, index in (("first", 0), ("last", -1)):
            values = np.array([np.mean(rows[index][measure]) for rows in probes])
            low, high, _ = t_interval(values, confidence)
            row[f"{measure}_{when}"] = {"mean": float(values.mean()), "low": low, "high": high}
    share = row["slow_share_last"]
    row["open"] = (share["low"] if share["low"] is not None else share["mean"]) > OPEN_GATE_THRESHOLD
    return row


def _gate_sentence(row: dict[str, Any]) -> str:
    gate, share = row["slow_gate_last"], row["slow_share_last"]
    state = "open" if row["open"] else "closed"
    return (
        f"{row['variant']}: the final gate is {state}, |g| = {_format_interval(gate, '{:.4f}')}, "
        f"‖g⊙ũ‖/‖x‖ = {_format_interval(share, '{:.2%}')}"
    )


def _contrast_sentence(row: dict[str, Any]) -> str:
    difference = row["difference"]
    significant = difference["low"] is not None and (difference["low"] > 0 or difference["high"] < 0)
    verdict = ("helps" if difference["mean"] < 0 else "hurts") if significant else "no evidence"
    return (
        f"{row['variant']} against {row['against']} ({row['meaning']}): perplexity "
        f"{_format_interval(difference['percent'], '{:+.2f}%')}, {verdict}"
    )


def _format_interval(value: dict[str, Any], fmt: str) -> str:
    """Format `mean [low, high]`; None is a value that overflows, or a missing interval."""
    mean, low, high = (
        "∞" if value[name] is None else fmt.format(value[name]) for name in ("mean", "low", "high")
    )
    return mean if value["low"] is None else f"{mean} [{low}, {high}]"
