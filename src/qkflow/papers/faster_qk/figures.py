"""Interactive figures of the pace commands, each one HTML file that opens with no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from qkflow.files import write_atomic
from qkflow.papers.faster_qk.fixed_attention import FixedAttentionResult
from qkflow.papers.faster_qk.reduced_flow import ReducedFlow

_AXIS_LABELS = {
    "time": "time · η<sub>OV</sub>",
    "mu_qk": "μ<sub>QK</sub>",
    "mu_ov": "μ<sub>OV</sub>",
    "alpha": "α",
    "loss": "L",
}
_AXIS_TYPES = {"time": "log", "loss": "log"}


def write_figure(figure: Any, path: Path) -> None:
    """Write a plotly figure with the library inlined."""
    write_atomic(path, figure.to_html(include_plotlyjs=True, full_html=True))


def flow_figure(flows: Sequence[ReducedFlow], loss: float) -> Any:
    """μ_QK, μ_OV, α and L of every flow against time, and against each other."""
    from plotly.colors import sample_colorscale
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    over_time = [("time", name) for name in ("mu_qk", "mu_ov", "alpha", "loss")]
    crossed = [("mu_ov", "mu_qk"), ("loss", "mu_qk"), ("loss", "mu_ov"), ("loss", "alpha")]
    panels = [(index // 4 + 1, index % 4 + 1, x, y) for index, (x, y) in enumerate(over_time + crossed)]
    titles = [f"{_AXIS_LABELS[y]} against {_AXIS_LABELS[x]}" for _, _, x, y in panels]
    figure = make_subplots(rows=2, cols=4, subplot_titles=titles, horizontal_spacing=0.06)
    colours = sample_colorscale("Viridis", list(np.linspace(0, 0.9, max(len(flows), 2))))
    for flow, colour in zip(flows, colours, strict=False):
        path = flow.trajectory(loss)
        name = f"{flow.kind}, r = {flow.ratio:g}"
        style = {"name": name, "legendgroup": name, "line": {"color": colour}}
        for row, col, x, y in panels:
            trace = Scatter(x=path[x], y=path[y], showlegend=(row, col) == (1, 1), **style)
            figure.add_trace(trace, row=row, col=col)
    for row, col, x, y in panels:
        falling = {"autorange": "reversed"} if x == "loss" else {}  # training runs from left to right
        figure.update_xaxes(title_text=_AXIS_LABELS[x], type=_AXIS_TYPES.get(x), row=row, col=col, **falling)
        figure.update_yaxes(title_text=_AXIS_LABELS[y], type=_AXIS_TYPES.get(y), row=row, col=col)
    title = f"Reduced gradient flow down to loss {loss:g}"
    return figure.update_layout(title=title, height=800, template="plotly_white")


def heatmap_figure(heatmaps: Mapping[str, np.ndarray], edges: Sequence[float]) -> Any:
    """Per setting, the share (%) of instances by distinct-token attention and probability of the truth."""
    from plotly.graph_objects import Heatmap
    from plotly.subplots import make_subplots

    columns = min(3, len(heatmaps))
    rows = -(-len(heatmaps) // columns)
    figure = make_subplots(rows=rows, cols=columns, subplot_titles=list(heatmaps), horizontal_spacing=0.08)
    labels = [f"{low:.1f}–{high:.1f}" for low, high in pairwise(edges)]
    look = {"zmin": 0, "zmax": 100, "colorscale": "Blues", "texttemplate": "%{z:.1f}", "showscale": False}
    for index, shares in enumerate(heatmaps.values()):
        cells = Heatmap(z=shares.T, x=labels, y=labels, **look)
        figure.add_trace(cells, row=index // columns + 1, col=index % columns + 1)
    figure.update_xaxes(title_text="attention on distinct tokens")
    figure.update_yaxes(title_text="probability of the truth")
    return figure.update_layout(title="Share of instances (%)", height=420 * rows, template="plotly_white")


def fixed_attention_figure(results: Sequence[FixedAttentionResult]) -> Any:
    """Loss of each circuit under fixed attention against training steps, and the final gain against α."""
    from plotly.colors import sample_colorscale
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    kinds = list(dict.fromkeys(each.kind for each in results))
    titles = [f"loss, {kind} output-value circuit" for kind in kinds] + ["marginal gain at the end"]
    figure = make_subplots(rows=1, cols=len(titles), subplot_titles=titles)
    for col, kind in enumerate(kinds, start=1):
        group = [each for each in results if each.kind == kind]
        for each in group:
            colour = sample_colorscale("Viridis", [0.9 * each.alpha])[0]
            style = {"name": f"α = {each.alpha:g}", "legendgroup": f"{each.alpha}", "line": {"color": colour}}
            steps, losses = zip(*each.history, strict=True)
            figure.add_trace(Scatter(x=steps, y=losses, showlegend=col == 1, **style), row=1, col=col)
        figure.update_xaxes(title_text="step", row=1, col=col)
        figure.update_yaxes(type="log", row=1, col=col)
        gains = [(each.alpha, each.gain) for each in group if each.gain is not None]
        trace = Scatter(x=[a for a, _ in gains], y=[g for _, g in gains], name=kind, mode="lines+markers")
        figure.add_trace(trace, row=1, col=len(titles))
    figure.update_xaxes(title_text="α", row=1, col=len(titles))
    figure.update_yaxes(type="log", row=1, col=len(titles))
    return figure.update_layout(title="Attention fixed at α", height=480, template="plotly_white")
