"""Several comparisons side by side on one page. Nothing is pooled: every study keeps its own verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qkflow.errors import InputError
from qkflow.html import cards
from qkflow.report import difference_figures, figures
from qkflow.report.document import render_document
from qkflow.report.figures import PALETTE
from qkflow.report.tables import format_difference
from qkflow.studies.cards import verdict_cards
from qkflow.studies.sentences import power_sentence

if TYPE_CHECKING:
    from qkflow.studies import Comparison
    from qkflow.studies.results import ArmSummary, StudySummary

_SYMBOLS = ("circle", "diamond", "square", "cross", "triangle-up", "x", "star", "hexagon")


def render_studies(comparisons: Sequence[Comparison]) -> str:
    """Return one page: a joint table and figure, then the cards and differences of every study."""
    names = study_names(comparisons)
    figures_by_name: dict[str, figures.Figure] = {}
    if joint := joint_figure(comparisons, names):
        figures_by_name["joint"] = joint
    studies = []
    for i, (name, comparison) in enumerate(zip(names, comparisons, strict=True)):
        summary, runs = comparison.summary, comparison.compared_runs
        own = {
            "differences": difference_figures.differences_figure(summary),
            "loss": figures.loss_curve_figure(summary, runs, "tokens"),
        }
        figures_by_name |= {f"study-{i}-{kind}": figure for kind, figure in own.items() if figure}
        styles = figures.variant_styles(summary)
        colors = {variant: style["color"] for variant, style in styles.items()}
        studies.append(
            {
                "name": name,
                "id": f"study-{i}",
                "folder": str(comparison.folder),
                "color": PALETTE[i % len(PALETTE)],
                "summary": summary,
                "colors": {arm.variant: colors[arm.variant] for arm in summary.arms},
                "cards": cards(verdict_cards(summary, colors), f"Verdicts of {name}"),
                "power_sentence": power_sentence(summary.power) if summary.power else "",
            }
        )
    return render_document(
        "studies.html", figures_by_name, studies=studies, rows=joint_rows(comparisons), names=names
    )


def study_names(comparisons: Sequence[Comparison]) -> list[str]:
    """Return a short name per study: of its folder or record, with its parent where two are alike."""
    paths = [comparison.folder.resolve() for comparison in comparisons]
    if len(set(paths)) < len(paths):
        raise InputError("a study is named twice: name every study once", code="duplicate-study")
    short = [path.stem if path.is_file() else path.name for path in paths]
    return [
        f"{path.parent.name}/{name}" if short.count(name) > 1 else name
        for path, name in zip(paths, short, strict=True)
    ]


def joint_rows(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Return one row per variant: its difference, interval and verdict in every study, None without it."""
    rows = []
    for variant in _variants(comparisons):
        cells = []
        for comparison in comparisons:
            arm = _find_arm(comparison.summary, variant)
            mean, interval = format_difference(arm.difference) if arm else ("–", "–")
            cells.append(
                {
                    "value": arm.difference.percent["mean"] if arm and arm.difference else None,
                    "mean": mean,
                    "interval": interval,
                    "verdict": str(arm.verdict) if arm else "–",
                }
            )
        rows.append({"variant": variant, "cells": cells})
    return rows


def joint_figure(comparisons: Sequence[Comparison], names: Sequence[str]) -> figures.Figure | None:
    """Draw every variant with one interval per study, each against the reference of its own study."""
    variants = _variants(comparisons)
    traces = []
    for i, (comparison, name) in enumerate(zip(comparisons, names, strict=True)):
        offset = 0.5 - (i + 1) / (len(comparisons) + 1)
        for row, variant in enumerate(reversed(variants)):
            arm = _find_arm(comparison.summary, variant)
            if arm and arm.difference:
                trace = difference_figures.interval_trace(
                    arm.difference, row + offset, PALETTE[i % len(PALETTE)], f"{variant}, {name}", True
                )
                trace["name"] = figures.plot_text(f"{variant}, {name}")
                trace["marker"]["symbol"] = _SYMBOLS[i % len(_SYMBOLS)]
                traces.append(trace)
    if not traces:
        return None
    metrics = {comparison.summary.metric for comparison in comparisons}
    height = max(40, 22 * len(comparisons))
    rows = list(reversed(variants))
    return difference_figures.rows_figure(
        traces, rows, row_height=height, metric=" or ".join(sorted(metrics))
    )


def _variants(comparisons: Sequence[Comparison]) -> list[str]:
    return list(dict.fromkeys(arm.variant for each in comparisons for arm in each.summary.variants))


def _find_arm(summary: StudySummary, variant: str) -> ArmSummary | None:
    return next((arm for arm in summary.variants if arm.variant == variant), None)
