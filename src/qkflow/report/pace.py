"""Report of a pace study: report.html and summary.csv."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from qkflow.files import write_atomic
from qkflow.html import json_for_script
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
from qkflow.report.page import load_template

if TYPE_CHECKING:
    from qkflow.studies.pace.results import PaceStudyResult, PaceSummary

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
    """Return the self-contained HTML page. The template engine escapes all text."""
    from plotly.offline import get_plotlyjs

    colors = _ratio_colors(summary)
    heatmap_titles = {f"heatmap-{i}": f"r = {row.ratio}" for i, row in enumerate(summary.rows) if row.heatmap}
    figures: dict[str, Figure] = {
        f"heatmap-{i}": _heatmap_figure(row.heatmap) for i, row in enumerate(summary.rows) if row.heatmap
    }
    curve_titles = {}
    for name, title in CURVE_TITLES.items():
        if figure := _curve_figure(summary, name, colors):
            figures[f"curve-{name}"], curve_titles[f"curve-{name}"] = figure, title
    return load_template("pace.html").render(
        summary=summary,
        config=summary.config,
        settings=summary.recipe.to_dict(),
        colors=colors,
        cells={row.ratio: ratio_cells(row) for row in summary.rows},
        headings=COLUMN_HEADINGS.values(),
        published=published_rows(summary),
        attribution_rows=_attribution_rows(summary),
        attribution_methods=attribution_methods(summary),
        figures=figures,
        heatmaps=heatmap_titles,
        curves=curve_titles,
        figures_json=json_for_script(figures),
        plotly_js=get_plotlyjs(),
    )


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
    labels = [
        f"{low:.1f}–{high:.1f}" for low, high in pairwise(i / len(shares) for i in range(len(shares) + 1))
    ]
    layout = base_layout("attention on the rationale") | {"height": 330, "hovermode": "closest"}
    layout["yaxis"] |= {"title": {"text": "p(true label)", "font": {"size": 12}}}
    for axis in ("xaxis", "yaxis"):
        layout[axis] |= {"type": "category", "showgrid": False}
    trace: dict[str, Any] = {
        "type": "heatmap",
        "z": [[round(share, 1) for share in column] for column in zip(*shares, strict=True)],
        "x": labels,
        "y": labels,
        "zmin": 0,
        "zmax": 100,
        "colorscale": [[0, "rgba(26,128,196,0.05)"], [1, PALETTE[0]]],
        "showscale": False,
        "texttemplate": "%{z:.1f}",
        "hovertemplate": "attention %{x}, p(true label) %{y}: %{z:.1f}%<extra></extra>",
    }
    return {"data": [trace], "layout": layout}


def _curve_figure(summary: PaceSummary, name: str, colors: dict[str, str]) -> Figure | None:
    traces = []
    for row in summary.rows:
        points = summary.curves.get(row.ratio, {}).get(name)
        if points:
            style = {"color": colors[row.ratio], "dash": "solid"}
            traces += band_and_line_traces(points, f"r = {row.ratio}", style, True)
    return {"data": traces, "layout": base_layout("training steps") | {"height": 290}} if traces else None
