"""Tables of a comparison for `qkflow report --table`: verdicts, cells and training dynamics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from qkflow.report.tables import format_change, format_difference, format_number
from qkflow.studies import Comparison
from qkflow.studies.run_data import RunData
from qkflow.studies.stats import paired_difference, t_interval

TableName = Literal["verdicts", "cells", "rates", "gaps", "dynamics"]
Row = dict[str, str]
GAP_COLUMNS = 5  # token counts at which the gap to the reference is shown
INDUCTION_THRESHOLD = 0.3  # of the strongest head: an induction head has formed


def verdict_rows(comparison: Comparison) -> list[Row]:
    """Return one row per arm: its perplexity, and the judged difference to the reference."""
    summary, rows = comparison.summary, []
    for arm in summary.arms:
        mean, interval = format_difference(arm.difference)
        rows.append(
            {
                "variant": arm.variant,
                "init": arm.best_init,
                "lr": format_number(arm.lr, ".2g"),
                "seeds": str(len(arm.seeds)),
                "perplexity": format_number(arm.perplexity, ".1f"),
                "bits per byte": format_number(arm.bits_per_byte, ".3f"),
                "difference (95%)": "–" if arm.difference is None else f"{mean} ({interval})",
                "p, Holm": _p_value(arm.p_holm),
                "verdict": str(arm.verdict),
            }
        )
    if floor := summary.noise_floor:
        mean, interval = format_difference(floor.difference)
        blank = dict.fromkeys(rows[0], "–")
        rows.append(
            blank
            | {"variant": "A/A: the reference with other seeds", "difference (95%)": f"{mean} ({interval})"}
        )
    return rows


def cell_rows(comparison: Comparison) -> list[Row]:
    """Return one row per model and init, best first: its perplexity over all seeds, with an interval."""
    rows = []
    for cell, runs in _runs_by_cell(comparison, ("screen", "compare")).items():
        losses = np.array([run.loss for run in runs if run.loss is not None])
        low, high, _ = t_interval(losses, comparison.summary.config.confidence)
        sd = float(losses.std(ddof=1)) if len(losses) > 1 else None
        rows.append(
            (
                float(losses.mean()) if len(losses) else math.inf,
                {
                    "model": cell,
                    "lr": format_number(runs[0].lr, ".2g"),
                    "seeds": str(len(losses)),
                    "perplexity (95%)": _interval(_exp(losses.mean()), _exp(low), _exp(high), ".1f")
                    if len(losses)
                    else "diverged",
                    "seed noise": "–" if sd is None else f"{100 * sd:.1f}%",
                    "failed": str(len(runs) - len(losses)),
                },
            )
        )
    return [row for _, row in sorted(rows, key=lambda item: item[0])]


def rate_rows(comparison: Comparison) -> list[Row]:
    """Return the learning-rate search: one row per cell, the final loss by rate, the best one in bold."""
    searches = comparison.summary.learning_rates
    rates = sorted({trial.lr for search in searches for trial in search.tried if trial.loss is not None})
    rows = []
    for search in searches:
        losses = {trial.lr: trial.loss for trial in search.tried}
        row = {"model": search.cell}
        for lr in rates:
            text = format_number(losses.get(lr), ".3f")
            row[f"{lr:.2g}"] = f"**{text}**" if lr == search.chosen else text
        rows.append(row)
    return rows


def gap_rows(comparison: Comparison) -> list[Row]:
    """Return one row per judged model: its difference to the reference during training, by tokens.

    Evaluations before the last are on fewer tokens, so their intervals are wide.
    """
    reference = comparison.summary.reference
    if reference is None:
        return []
    curves = {run.seed: dict(_loss_by_tokens(run)) for run in comparison.runs_of(reference.cell)}
    common = sorted(set.intersection(*(set(curve) for curve in curves.values())) if curves else ())
    kept = (
        [common[round(i * (len(common) - 1) / GAP_COLUMNS)] for i in range(1, GAP_COLUMNS + 1)]
        if common
        else []
    )
    rows = []
    for cell, runs in _runs_by_cell(comparison, ("compare",)).items():
        row = {"model": cell, "seeds": str(len(runs))}
        for tokens in kept:
            pairs = [
                (loss, base)
                for run in runs
                if (loss := dict(_loss_by_tokens(run)).get(tokens)) is not None
                and (base := curves.get(run.seed, {}).get(tokens)) is not None
            ]
            row[f"{tokens / 1e3:.0f}k"] = _gap(pairs, comparison) if cell != reference.cell else "–"
        rows.append(row)
    return rows


def _loss_by_tokens(run: RunData) -> list[tuple[float, float]]:
    return [(tokens, loss) for _, tokens, _, loss in run.curve()]


def _gap(pairs: Sequence[tuple[float, float]], comparison: Comparison) -> str:
    if len(pairs) < 2:
        return "–"
    losses, reference = ([pair[side] for pair in pairs] for side in (0, 1))
    return format_change(paired_difference(losses, reference, comparison.summary.config.confidence))


def dynamics_rows(comparison: Comparison) -> list[Row]:
    """Return one row per judged model: stability of training, and what attention became."""
    rows = []
    for cell, runs in _runs_by_cell(comparison, ("compare",)).items():
        stabilities = [each for run in runs if (each := run.stability())]
        rows.append(
            {
                "model": cell,
                "seeds": str(len(runs)),
                "runs with loss spikes": str(sum(each.spikes > 0 for each in stabilities)),
                "gradient tail": _mean([each.grad_norm_tail for each in stabilities], ".1f×"),
                "induction head after": _mean([_induction_tokens(run) for run in runs], ".0f", 1e-3, "k"),
                "induction": _mean([_last_probe(run, "induction_score", max) for run in runs], ".2f"),
                "copy gain": _mean([_last_probe(run, "copy_gain", float) for run in runs], ".2f"),
                "symmetry": _mean([_last_probe(run, "qk_symmetry", np.mean) for run in runs], ".2f"),
                "directionality": _mean(
                    [_last_probe(run, "qk_directionality", np.mean) for run in runs], ".2f"
                ),
                "entropy": _mean([_last_probe(run, "attention_entropy", np.mean) for run in runs], ".2f"),
                "largest logit": _mean([_last_probe(run, "max_logit", max) for run in runs], ".0f"),
            }
        )
    return rows


TABLES: Mapping[TableName, Callable[[Comparison], list[Row]]] = {
    "verdicts": verdict_rows,
    "cells": cell_rows,
    "rates": rate_rows,
    "gaps": gap_rows,
    "dynamics": dynamics_rows,
}


def _runs_by_cell(comparison: Comparison, phases: Sequence[str]) -> dict[str, list[RunData]]:
    cells: dict[str, list[RunData]] = {}
    for run in comparison.runs:
        if run.phase in phases and run.result is not None:
            cells.setdefault(run.cell, []).append(run)
    return cells


def _induction_tokens(run: RunData) -> float | None:
    """Return the tokens after which a head first passed INDUCTION_THRESHOLD; None if none did."""
    for probe in run.metrics.get("probe", []):
        if max(probe.get("induction_score") or [0.0]) > INDUCTION_THRESHOLD:
            return float(probe["tokens"])
    return None


def _last_probe(run: RunData, name: str, reduce: Callable[[Any], Any]) -> float | None:
    values = [probe[name] for probe in run.metrics.get("probe", []) if name in probe]
    return float(reduce(values[-1])) if values else None


def _mean(values: Sequence[float | None], spec: str, factor: float = 1.0, unit: str = "") -> str:
    """Return the mean of the known values with its spread over seeds, and how many are known if not all."""
    known = np.array([value for value in values if value is not None]) * factor
    if not len(known):
        return "–"
    text = f"{format_number(float(known.mean()), spec)}{unit}"
    if len(known) > 1:
        text += f" ± {format_number(float(known.std(ddof=1)), spec)}"
    return text if len(known) == len(values) else f"{text} ({len(known)} of {len(values)} runs)"


def _interval(mean: float | None, low: float | None, high: float | None, spec: str) -> str:
    if low is None or high is None:
        return format_number(mean, spec)
    return f"{format_number(mean, spec)} ({format_number(low, spec)}…{format_number(high, spec)})"


def _exp(value: float | None) -> float | None:
    return None if value is None else math.exp(min(float(value), 700.0))


def _p_value(p: float | None) -> str:
    return "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"
