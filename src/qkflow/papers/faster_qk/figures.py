"""Plotly figures of the `qkflow pace` commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from qkflow.measures.heatmap import BIN_EDGES
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


def flow_figure(flows: Sequence[ReducedFlow], loss: float) -> Any:
    """Plot μ_QK, μ_OV, α and L of every flow against time, and against each other."""
    from plotly.colors import sample_colorscale
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    over_time = [("time", name) for name in ("mu_qk", "mu_ov", "alpha", "loss")]
    against_state = [("mu_ov", "mu_qk"), ("loss", "mu_qk"), ("loss", "mu_ov"), ("loss", "alpha")]
    panels = [(index // 4 + 1, index % 4 + 1, x, y) for index, (x, y) in enumerate(over_time + against_state)]
    titles = [f"{_AXIS_LABELS[y]} against {_AXIS_LABELS[x]}" for _, _, x, y in panels]
    figure = make_subplots(rows=2, cols=4, subplot_titles=titles, horizontal_spacing=0.06)
    colors = sample_colorscale("Viridis", list(np.linspace(0, 0.9, max(len(flows), 2))))
    for flow, color in zip(flows, colors, strict=False):
        trajectory = flow.trajectory(loss)
        name = f"{flow.kind}, r = {flow.ratio:g}"
        style = {"name": name, "legendgroup": name, "line": {"color": color}}
        for row, col, x, y in panels:
            trace = Scatter(x=trajectory[x], y=trajectory[y], showlegend=(row, col) == (1, 1), **style)
            figure.add_trace(trace, row=row, col=col)
    for row, col, x, y in panels:
        direction = {"autorange": "reversed"} if x == "loss" else {}  # training goes from left to right
        figure.update_xaxes(
            title_text=_AXIS_LABELS[x], type=_AXIS_TYPES.get(x), row=row, col=col, **direction
        )
        figure.update_yaxes(title_text=_AXIS_LABELS[y], type=_AXIS_TYPES.get(y), row=row, col=col)
    return figure.update_layout(height=800)


def heatmap_figure(heatmaps: Mapping[str, np.ndarray]) -> Any:
    """Plot, per setting, the share (%) of instances by attention on distinct tokens and label probability."""
    from plotly.graph_objects import Heatmap
    from plotly.subplots import make_subplots

    columns = min(3, len(heatmaps))
    rows = -(-len(heatmaps) // columns)
    figure = make_subplots(rows=rows, cols=columns, subplot_titles=list(heatmaps), horizontal_spacing=0.08)
    labels = [f"{low:.1f}–{high:.1f}" for low, high in pairwise(BIN_EDGES)]
    style = {"zmin": 0, "zmax": 100, "colorscale": "Blues", "texttemplate": "%{z:.1f}", "showscale": False}
    for index, shares in enumerate(heatmaps.values()):
        cells = Heatmap(z=shares.T, x=labels, y=labels, **style)
        figure.add_trace(cells, row=index // columns + 1, col=index % columns + 1)
    figure.update_xaxes(title_text="attention on distinct tokens")
    figure.update_yaxes(title_text="label probability")
    return figure.update_layout(height=420 * rows)


def fixed_attention_figure(results: Sequence[FixedAttentionResult]) -> Any:
    """Plot the loss under fixed attention against training steps, and the final marginal gain against α."""
    from plotly.colors import sample_colorscale
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    kinds = list(dict.fromkeys(result.kind for result in results))
    titles = [f"loss, {kind} output-value circuit" for kind in kinds] + ["final marginal gain"]
    figure = make_subplots(rows=1, cols=len(titles), subplot_titles=titles)
    for col, kind in enumerate(kinds, start=1):
        group = [result for result in results if result.kind == kind]
        for result in group:
            color = sample_colorscale("Viridis", [0.9 * result.alpha])[0]
            style = {
                "name": f"α = {result.alpha:g}",
                "legendgroup": f"{result.alpha}",
                "line": {"color": color},
            }
            steps, losses = zip(*result.history, strict=True)
            figure.add_trace(Scatter(x=steps, y=losses, showlegend=col == 1, **style), row=1, col=col)
        figure.update_xaxes(title_text="step", row=1, col=col)
        figure.update_yaxes(type="log", row=1, col=col)
        gains = [(result.alpha, result.gain) for result in group if result.gain is not None]
        trace = Scatter(
            x=[alpha for alpha, _ in gains], y=[gain for _, gain in gains], name=kind, mode="lines+markers"
        )
        figure.add_trace(trace, row=1, col=len(titles))
    figure.update_xaxes(title_text="α", row=1, col=len(titles))
    figure.update_yaxes(type="log", row=1, col=len(titles))
    return figure.update_layout(height=480)
