"""A study's report.html, with the look of every report, and its tables for programs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from qkflow.files import write_atomic, write_json
from qkflow.html import json_for_script
from qkflow.report.figures import PALETTE, REFERENCE_COLOR, Figure, band_and_line_traces, base_layout
from qkflow.report.pace_tables import (
    COLUMN_HEADINGS,
    TABLE_COLUMNS,
    format_cell,
    format_interval,
    published_cells,
    summary_csv,
)
from qkflow.report.page import load_template
from qkflow.studies.pace.analysis import ATTRIBUTION_METHODS
from qkflow.studies.pace.run import BIN_EDGES

CURVE_TITLES = {
    "mass": "Attention on the rationale",
    "truth": "Probability of the truth",
    "accuracy": "Accuracy",
    "qk_scale": "Query-key scale ‖W_QK‖",
    "ov_scale": "Output-value scale ‖W_OV‖",
    "effective_pace": "Effective pace (‖ΔQK‖/‖QK‖)/(‖ΔOV‖/‖OV‖)",
}


def write_outputs(folder: Path, summary: dict[str, Any]) -> None:
    """summary.json, summary.csv and report.html."""
    write_json(folder / "summary.json", summary)
    write_atomic(folder / "summary.csv", summary_csv(summary))
    write_atomic(folder / "report.html", render_report(summary))


def render_report(summary: dict[str, Any]) -> str:
    from plotly.offline import get_plotlyjs

    colours = _colours(summary)
    heatmaps = {
        f"heatmap-{i}": _heatmap_figure(row) for i, row in enumerate(summary["rows"]) if row["heatmap"]
    }
    titles = {f"heatmap-{i}": f"r = {row['ratio']}" for i, row in enumerate(summary["rows"])}
    curves = {
        f"curve-{name}": figure for name in CURVE_TITLES if (figure := _curve_figure(summary, name, colours))
    }
    drawn = {**heatmaps, **curves}
    return load_template("pace.html").render(
        summary=summary,
        config=summary["config"],
        colours=colours,
        cells={row["ratio"]: [format_cell(row, name) for name in TABLE_COLUMNS] for row in summary["rows"]},
        headings=[COLUMN_HEADINGS[name] for name in TABLE_COLUMNS],
        published=[
            (title, published_cells(summary, faster))
            for faster, title in _PUBLISHED_TITLES
            if summary["published"]
        ],
        explains=_attribution_rows(summary),
        sources=ATTRIBUTION_METHODS,
        figures=drawn,
        heatmaps={name: titles[name] for name in heatmaps},
        curves={name: CURVE_TITLES[name.removeprefix("curve-")] for name in curves},
        figures_json=json_for_script(drawn),
        plotly_js=get_plotlyjs(),
    )


_PUBLISHED_TITLES = ((False, "published, same rate"), (True, "published, faster"))


def _colours(summary: dict[str, Any]) -> dict[str, str]:
    others = [row["ratio"] for row in summary["rows"] if row["ratio"] != summary["baseline"]]
    found = {ratio: PALETTE[place % len(PALETTE)] for place, ratio in enumerate(others)}
    return {summary["baseline"]: REFERENCE_COLOR, **found}


def _attribution_rows(summary: dict[str, Any]) -> list[list[str]]:
    over = {row["ratio"]: row for row in summary["explains"]}
    rows = []
    for row in summary["rows"]:
        if row["deletions"]:
            means = [f"{row['deletions'][source]['comprehensiveness']:.3f}" for source in ATTRIBUTION_METHODS]
            against = [
                format_interval(over[row["ratio"]][name]) for name in ("attention_random", "gradient_random")
            ]
            rows.append([row["ratio"], *means, *against])
    return rows


def _heatmap_figure(row: dict[str, Any]) -> Figure:
    """Attention on the rationale × probability of the truth."""
    labels = [f"{low:.1f}–{high:.1f}" for low, high in pairwise(BIN_EDGES)]
    layout = base_layout("attention on the rationale") | {"height": 330, "hovermode": "closest"}
    layout["yaxis"] |= {"title": {"text": "p(truth)", "font": {"size": 12}}}
    for axis in ("xaxis", "yaxis"):
        layout[axis] |= {"type": "category", "showgrid": False}
    cells = [[round(share, 1) for share in column] for column in zip(*row["heatmap"], strict=True)]
    trace = {
        "type": "heatmap",
        "z": cells,
        "x": labels,
        "y": labels,
        "zmin": 0,
        "zmax": 100,
        "colorscale": [[0, "rgba(26,128,196,0.05)"], [1, PALETTE[0]]],
        "showscale": False,
        "texttemplate": "%{z:.1f}",
        "hovertemplate": "attention %{x}, p(truth) %{y}: %{z:.1f}%<extra></extra>",
    }
    return {"data": [trace], "layout": layout}


def _curve_figure(summary: dict[str, Any], name: str, colours: dict[str, str]) -> Figure | None:
    traces = []
    for row in summary["rows"]:
        points = summary["curves"].get(row["ratio"], {}).get(name)
        if points:
            style = {"color": colours[row["ratio"]], "dash": "solid"}
            traces += band_and_line_traces(
                [tuple(point) for point in points], f"r = {row['ratio']}", style, True
            )
    return {"data": traces, "layout": base_layout("training steps") | {"height": 290}} if traces else None
