"""Report of a pace study: report.html and summary.csv."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from qkflow.files import write_atomic
from qkflow.html import Card, cards
from qkflow.report.document import render_content, render_document
from qkflow.report.figure_page import shares_heatmap
from qkflow.report.figures import PALETTE, REFERENCE_COLOR, Figure, band_and_line_traces, base_layout
from qkflow.report.pace_tables import (
    COLUMN_HEADINGS,
    attribution_cells,
    attribution_methods,
    format_interval,
    published_rows,
    ratio_cells,
    summary_csv,
)

if TYPE_CHECKING:
    from qkflow.studies.pace.results import PaceStudyResult, PaceSummary

TEMPLATE = "pace.html"
CURVE_TITLES = {
    "mass": "Attention on the rationale",
    "truth": "Probability of the true label",
    "accuracy": "Accuracy",
    "qk_scale": "Query-key scale ‖W_QK‖",
    "ov_scale": "Output-value scale ‖W_OV‖",
    "effective_pace": "Effective pace (‖ΔQK‖/‖QK‖)/(‖ΔOV‖/‖OV‖)",
}


def write_report(result: PaceStudyResult) -> None:
    """Write summary.csv and report.html into the folder of the study."""
    write_atomic(result.folder / "summary.csv", summary_csv(result.summary))
    write_atomic(result.folder / "report.html", render_report(result.summary))


def render_report(summary: PaceSummary) -> str:
    """Return the self-contained HTML page."""
    return render_document(TEMPLATE, **report_context(summary))


def render_live_content(summary: PaceSummary) -> tuple[str, dict[str, Figure]]:
    """Return the content of the page and its figures, for a page that is already open."""
    context = report_context(summary)
    return render_content(TEMPLATE, **context), context["figures"]


def report_context(summary: PaceSummary) -> dict[str, Any]:
    """Return the variables of the template."""
    colors = _ratio_colors(summary)
    heatmap_titles = {f"heatmap-{i}": f"r = {row.ratio}" for i, row in enumerate(summary.rows) if row.heatmap}
    figures: dict[str, Figure] = {
        f"heatmap-{i}": _heatmap_figure(row.heatmap) for i, row in enumerate(summary.rows) if row.heatmap
    }
    curve_titles = {}
    for name, title in CURVE_TITLES.items():
        if figure := _curve_figure(summary, name, colors):
            figures[f"curve-{name}"], curve_titles[f"curve-{name}"] = figure, title
    return {
        "figures": figures,
        "summary": summary,
        "config": summary.config,
        "settings": summary.recipe.to_dict(),
        "colors": colors,
        "cards": cards(_ratio_cards(summary, colors)),
        "cells": {row.ratio: ratio_cells(row) for row in summary.rows},
        "headings": COLUMN_HEADINGS.values(),
        "published": published_rows(summary),
        "attribution_rows": _attribution_rows(summary),
        "attribution_methods": attribution_methods(summary),
        "heatmaps": heatmap_titles,
        "curves": curve_titles,
    }


def _ratio_cards(summary: PaceSummary, colors: dict[str, str]) -> list[Card]:
    return [
        Card(title=f"r = {row.ratio}", text=" ".join(row.sentences), color=colors[row.ratio])
        for row in summary.rows
        if row.sentences
    ]


def _ratio_colors(summary: PaceSummary) -> dict[str, str]:
    others = [row.ratio for row in summary.rows if row.ratio != summary.baseline]
    colors = {ratio: PALETTE[i % len(PALETTE)] for i, ratio in enumerate(others)}
    return {summary.baseline: REFERENCE_COLOR, **colors}


def _attribution_rows(summary: PaceSummary) -> list[list[str]]:
    contrasts = {each.ratio: each.differences for each in summary.explains}
    return [
        [
            row.ratio,
            *attribution_cells(row),
            *(format_interval(contrasts[row.ratio][f"{name}_random"]) for name in ("attention", "gradient")),
        ]
        for row in summary.rows
        if row.deletions
    ]


def _heatmap_figure(shares: list[list[float]]) -> Figure:
    """Draw the share (%) of examples by attention on the rationale and probability of the true label."""
    edges = [i / len(shares) for i in range(len(shares) + 1)]
    labels = [f"{low:.1f}–{high:.1f}" for low, high in pairwise(edges)]
    return shares_heatmap(shares, labels, "attention on the rationale", "p(true label)")


def _curve_figure(summary: PaceSummary, name: str, colors: dict[str, str]) -> Figure | None:
    traces = []
    for row in summary.rows:
        points = summary.curves.get(row.ratio, {}).get(name)
        if points:
            style = {"color": colors[row.ratio], "dash": "solid"}
            traces += band_and_line_traces(points, f"r = {row.ratio}", style, True)
    return {"data": traces, "layout": base_layout("training steps") | {"height": 290}} if traces else None
