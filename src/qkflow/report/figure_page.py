"""A page of figures with a heading and a sentence each: theory, and experiments that are not studies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from qkflow.report.document import render_document
from qkflow.report.figures import PALETTE, Figure, base_layout, plot_text, round_for_plot


class FigureSection(NamedTuple):
    """A heading, a sentence and the figures below them, by title."""

    heading: str
    text: str
    figures: Mapping[str, Figure]


def render_figure_page(title: str, sections: Sequence[FigureSection], intro: str = "") -> str:
    """Return a self-contained page."""
    figures: dict[str, Figure] = {}
    shown: list[tuple[FigureSection, dict[str, str], dict[str, str]]] = []
    for i, section in enumerate(sections):
        titles = {f"figure-{i}-{j}": name for j, name in enumerate(section.figures)}
        figures |= dict(zip(titles, section.figures.values(), strict=True))
        shown.append((section, titles, _legend(section.figures.values())))
    return render_document("figures.html", figures, title=title, intro=intro, sections=shown)


def line_figure(
    traces: Sequence[dict[str, Any]], x_title: str, y_title: str = "", log: str = "", height: int = 380
) -> Figure:
    """Return a figure of lines and points; `log` names the axes that are logarithmic: "x", "y" or "xy"."""
    layout = base_layout(x_title) | {"height": height, "hovermode": "closest"}
    layout["yaxis"]["title"] = {"text": y_title, "font": {"size": 12}}
    for axis in log:
        layout[f"{axis}axis"] |= {"type": "log", "exponentformat": "power"}
    return {"data": list(traces), "layout": layout}


def line_trace(
    name: str, x: Iterable[Any], y: Iterable[float], color: str = PALETTE[0], mode: str = "lines"
) -> dict[str, Any]:
    """Return one line or set of points. Values that JSON does not have are left out of the line."""
    label = plot_text(name)
    return {
        "type": "scatter",
        "mode": mode,
        "name": label,
        "x": [value if isinstance(value, str) else round_for_plot(float(value)) for value in x],
        "y": [round_for_plot(value) if np.isfinite(value) else None for value in map(float, y)],
        "line": {"color": color, "width": 2},
        "marker": {"color": color, "size": 8},
        "hovertemplate": f"{label}: %{{x}}, %{{y:.4g}}<extra></extra>",
    }


def shares_heatmap(shares: Any, labels: Sequence[str], x_title: str, y_title: str) -> Figure:
    """Return a heatmap of shares (%) by two binned quantities, the first of them along x."""
    layout = base_layout(x_title) | {"height": 330, "hovermode": "closest"}
    layout["yaxis"] |= {"title": {"text": y_title, "font": {"size": 12}}}
    for axis in ("xaxis", "yaxis"):
        layout[axis] |= {"type": "category", "showgrid": False}
    trace = {
        "type": "heatmap",
        "z": [[round(float(share), 1) for share in column] for column in zip(*shares, strict=True)],
        "x": list(labels),
        "y": list(labels),
        "zmin": 0,
        "zmax": 100,
        "colorscale": [[0, "rgba(26,128,196,0.05)"], [1, PALETTE[0]]],
        "showscale": False,
        "texttemplate": "%{z:.1f}",
        "hovertemplate": f"{x_title} %{{x}}, {y_title} %{{y}}: %{{z:.1f}}%<extra></extra>",
    }
    return {"data": [trace], "layout": layout}


def sequence_colors(count: int) -> list[str]:
    """Return colors for an ordered quantity, from blue to orange; readable on light and dark pages."""
    first, last = (np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) for color in PALETTE[:2])
    shares = np.linspace(0, 1, max(count, 2))[:count]
    return ["#" + "".join(f"{round(c):02x}" for c in first + share * (last - first)) for share in shares]


def _legend(figures: Iterable[Figure]) -> dict[str, str]:
    """Return color by name of the lines in all figures of a section."""
    return {
        trace["name"]: trace["line"]["color"]
        for figure in figures
        for trace in figure["data"]
        if trace["type"] == "scatter" and trace.get("name")
    }
