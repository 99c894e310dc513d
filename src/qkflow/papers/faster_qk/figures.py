"""Pages of the `qkflow pace` commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from qkflow.measures.heatmap import BIN_EDGES
from qkflow.papers.faster_qk.fixed_attention import FixedAttentionResult
from qkflow.papers.faster_qk.reduced_flow import ReducedFlow
from qkflow.report.figure_page import (
    FigureSection,
    line_figure,
    line_trace,
    render_figure_page,
    sequence_colors,
    shares_heatmap,
)
from qkflow.report.figures import PALETTE

_LABELS = {"time": "time · η_OV", "mu_qk": "μ_QK", "mu_ov": "μ_OV", "alpha": "α", "loss": "L"}
_LOG_AXES = ("time", "loss")
_OVER_TIME = [("time", name) for name in ("mu_qk", "mu_ov", "alpha", "loss")]
_OVER_STATE = [("mu_ov", "mu_qk"), ("loss", "mu_qk"), ("loss", "mu_ov"), ("loss", "alpha")]


def flow_page(flows: Sequence[ReducedFlow], loss: float) -> str:
    """Draw μ_QK, μ_OV, α and L of every flow against time, and against each other."""
    trajectories = [(f"{flow.kind}, r = {flow.ratio:g}", flow.trajectory(loss)) for flow in flows]
    colors = sequence_colors(len(flows))
    sections = []
    for heading, panels in (("Over time", _OVER_TIME), ("Against each other", _OVER_STATE)):
        figures = {}
        for x, y in panels:
            traces = [
                line_trace(name, values[x], values[y], color)
                for (name, values), color in zip(trajectories, colors, strict=True)
            ]
            log = "".join(axis for axis, name in (("x", x), ("y", y)) if name in _LOG_AXES)
            figure = line_figure(traces, _LABELS[x], log=log, height=320)
            if x == "loss":
                figure["layout"]["xaxis"]["autorange"] = "reversed"  # training goes from left to right
            figures[f"{_LABELS[y]} against {_LABELS[x]}"] = figure
        sections.append(FigureSection(heading, "", figures))
    return render_figure_page(f"Reduced gradient flow down to loss {loss:g}", sections)


def heatmap_page(heatmaps: Mapping[str, np.ndarray]) -> str:
    """Draw, per setting, the share (%) of instances by attention on distinct tokens and label probability."""
    labels = [f"{low:.1f}–{high:.1f}" for low, high in pairwise(BIN_EDGES)]
    axes = ("attention on distinct tokens", "label probability")
    figures = {name: shares_heatmap(shares, labels, *axes) for name, shares in heatmaps.items()}
    text = f"By {axes[0]} (across) and {axes[1]} (up)."
    return render_figure_page("Share of instances (%)", [FigureSection("By setting", text, figures)])


def fixed_attention_page(results: Sequence[FixedAttentionResult]) -> str:
    """Draw the loss under fixed attention against training steps, and the final marginal gain against α."""
    kinds = list(dict.fromkeys(result.kind for result in results))
    alphas = sorted({result.alpha for result in results})
    colors = dict(zip(alphas, sequence_colors(len(alphas)), strict=True))
    losses, gains = {}, []
    for kind, color in zip(kinds, PALETTE, strict=False):
        group = [result for result in results if result.kind == kind]
        traces = [
            line_trace(
                f"α = {each.alpha:g}",
                [step for step, _ in each.history],
                [loss for _, loss in each.history],
                colors[each.alpha],
            )
            for each in group
        ]
        losses[f"Loss, {kind} output-value circuit"] = line_figure(traces, "step", log="y")
        known = {each.alpha: each.gain for each in group if each.gain is not None}
        gains.append(line_trace(kind, known, known.values(), color, "lines+markers"))
    sections = [
        FigureSection("Loss over training", "", losses),
        FigureSection("Final marginal gain", "", {"Marginal gain": line_figure(gains, "α", log="y")}),
    ]
    return render_figure_page("Attention fixed at α", sections)
