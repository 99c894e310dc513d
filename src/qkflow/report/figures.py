"""The figures of a report, as plain Plotly dicts: the page draws them with plotly.js.

A variant has the same color in all figures (after Okabe & Ito 2008, safe for color-blind readers); the
reference is gray. report.js sets the colors of text and grid, for light and dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from qkflow.studies.stats import perplexity_percent_change

if TYPE_CHECKING:
    from qkflow.studies.results import StudySummary
    from qkflow.studies.run_data import RunData

REFERENCE_COLOR = "#808080"
PALETTE = ("#1A80C4", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#A6761D", "#8C6BB1")
DASHES = ("solid", "dash", "dashdot", "longdash")  # the next one for every repetition of the palette

PROBE_TITLES = {
    "step_size": "Learned step size Δ",
    "attention_entropy": "Attention entropy, nats",
    "sink_mass": "Share of attention on the first token",
    "spectral_gap": "Spectral gap of attention",
    "effective_rank": "Effective rank of attention",
    "max_logit": "Largest attention score",
    "qk_scale": "Query-key scale ‖W_QK‖",
    "ov_scale": "Output-value scale ‖W_OV‖",
    "qk_largest": "Largest singular value of W_QK",
    "ov_largest": "Largest singular value of W_OV",
    "qk_rank": "Stable rank of W_QK",
    "ov_rank": "Stable rank of W_OV",
    "qk_symmetry": "Symmetry of W_QK",
    "qk_directionality": "Directionality of W_QK",
    "induction_score": "Induction score, strongest head",
    "previous_token_score": "Previous-token score, strongest head",
    "copy_gain": "Copy gain on repeated tokens, nats",
    "effective_pace": "Effective pace (‖ΔQK‖/‖QK‖)/(‖ΔOV‖/‖OV‖)",
    "qk_change": "Change of QK since init ‖ΔQK‖/‖QK‖",
    "ov_change": "Change of OV since init ‖ΔOV‖/‖OV‖",
    "ov_balance": "Balance ‖W_OᵀW_O − W_VW_Vᵀ‖",
    "slow_gate": "Gate |g|",
    "slow_share": "Slow share ‖g⊙ũ‖/‖x‖",
    "slow_grad_norm": "Slow gradient norm",
    "slow_grad_share": "Slow share of the gradient norm",
}

Figure = dict[str, Any]
Curve = list[tuple[float, float, float, float]]  # (step, tokens, seconds, loss)


def variant_styles(summary: StudySummary) -> dict[str, dict[str, str]]:
    """Return color and dash of every arm."""
    styles = {
        arm.variant: {
            "color": PALETTE[i % len(PALETTE)],
            "dash": DASHES[i // len(PALETTE) % len(DASHES)],
        }
        for i, arm in enumerate(summary.variants)
    }
    if summary.reference:
        styles[summary.reference.variant] = {"color": REFERENCE_COLOR, "dash": "solid"}
    return styles


def loss_curve_figure(
    summary: StudySummary, runs: Sequence[RunData], axis: Literal["tokens", "seconds"]
) -> Figure | None:
    """Draw the validation loss over `axis`: mean over seeds, with the range of the seeds as a band.

    Curves of other inits than an arm's best are hidden; a checkbox of the page shows them.
    """
    styles, traces, late_losses = variant_styles(summary), [], []
    drawn: set[str] = set()
    for arm in summary.arms:
        for init in sorted(arm.by_init, key=lambda init: init.cell != arm.cell):
            curve = _mean_eval_curve([run for run in runs if run.cell == init.cell], axis)
            if not curve or init.cell in drawn:  # one cell may belong to two arms
                continue
            drawn.add(init.cell)
            is_best = init.cell == arm.cell
            name = f"{arm.variant} with {init.init}"
            traces += band_and_line_traces(curve, name, styles[arm.variant], is_best)
            late_losses += [point[1] for point in curve if is_best and point[0] >= 0.2 * curve[-1][0]]
    if not traces:
        return None
    title = {"tokens": "training tokens", "seconds": "training seconds, at the typical speed of a run"}[axis]
    layout = base_layout(title) | {"height": 380}
    if late_losses:
        low, high = min(late_losses), max(late_losses)
        margin = 0.06 * (high - low) + 1e-3
        layout["yaxis"]["range"] = [low - margin, high + margin]  # a double click shows all
    return {"data": traces, "layout": layout}


def perplexity_gap_figure(summary: StudySummary, runs: Sequence[RunData]) -> Figure | None:
    """Draw the difference of each variant to the reference after equally many tokens, over training."""
    styles, traces = variant_styles(summary), []
    reference = summary.reference
    if reference is None:
        return None
    base = {run.seed: run.curve() for run in runs if run.cell == reference.cell}
    for arm in summary.variants:
        ours = _finished_or_all([run for run in runs if run.cell == arm.cell != reference.cell])
        curves = [
            _perplexity_gap_curve(run.curve(), base[run.seed])
            for run in ours
            if base.get(run.seed) and run.curve()
        ]
        if curves:
            points = _mean_and_range(curves)
            traces += band_and_line_traces(points, arm.variant, styles[arm.variant], True, "%{y:+.2f}%")
    if not traces:
        return None
    layout = base_layout("training tokens") | {"height": 340}
    layout["yaxis"] |= {"zeroline": True, "ticksuffix": "%"}
    return {"data": traces, "layout": layout}


def _perplexity_gap_curve(curve: Curve, reference: Curve) -> dict[float, tuple[float, float]]:
    """Return {step: (tokens, percent of perplexity)} within the range that both have trained.

    The reference's loss is interpolated: with equal time or FLOPs, the two are evaluated after different
    tokens.
    """
    tokens, losses = [point[1] for point in reference], [point[3] for point in reference]
    return {
        step: (x, gap)
        for step, x, _, loss in curve
        if tokens[0] <= x <= tokens[-1]
        and (gap := perplexity_percent_change(loss - float(np.interp(x, tokens, losses)))) is not None
    }


def _mean_and_range(
    curves: Sequence[dict[float, tuple[float, float]]],
) -> list[tuple[float, float, float, float]]:
    """Return (x, mean, lowest, highest) at every step that all curves have; a curve is {step: (x, value)}."""
    points = []
    for step in sorted(set.intersection(*map(set, curves))):
        xs, values = zip(*(curve[step] for curve in curves), strict=True)
        mean = sum(value / len(values) for value in values)  # the sum itself may overflow
        points.append((sum(xs) / len(xs), mean, min(values), max(values)))
    return points


def _finished_or_all(runs: Sequence[RunData]) -> Sequence[RunData]:
    """Return the finished runs, if any: a mean ends with its shortest curve."""
    return [run for run in runs if run.status == "finished"] or runs


def _mean_eval_curve(
    runs: Sequence[RunData], axis: Literal["tokens", "seconds"]
) -> list[tuple[float, float, float, float]]:
    column = {"tokens": 1, "seconds": 2}[axis]
    curves = [
        {row[0]: (row[column], row[3]) for row in run.curve()}
        for run in _finished_or_all(runs)
        if run.curve()
    ]
    return _mean_and_range(curves) if curves else []


def band_and_line_traces(
    points: list[tuple[float, float, float, float]],
    name: str,
    style: dict[str, str],
    is_best: bool,
    hover_format: str = "%{y:.4f}",
) -> list[dict[str, Any]]:
    xs = [round_for_plot(point[0]) for point in points]
    line = {
        "type": "scatter",
        "mode": line_mode(xs),
        "name": plot_text(name),
        "x": xs,
        "y": [round_for_plot(point[1]) for point in points],
        "line": {"color": style["color"], "width": 2.4, "dash": style["dash"] if is_best else "dot"},
        "visible": is_best,
        "meta": {"best": is_best},
        "hovertemplate": f"{plot_text(name)}: {hover_format}<extra></extra>",
    }
    if not is_best or len(points) < 2:
        return [line]
    band = {
        "type": "scatter",
        "mode": "lines",
        "x": xs + xs[::-1],
        "y": [round_for_plot(point[3]) for point in points]
        + [round_for_plot(point[2]) for point in points[::-1]],
        "fill": "toself",
        "fillcolor": transparent(style["color"]),
        "line": {"width": 0},
        "meta": {"best": True},
        "hoverinfo": "skip",
    }
    return [band, line]


def probe_figures(summary: StudySummary, runs: Sequence[RunData]) -> dict[str, Figure]:
    """Draw one small figure per probe: the mean over layers, and each layer, hidden."""
    styles = variant_styles(summary)
    traces: dict[str, list[dict[str, Any]]] = {}
    for arm in summary.arms:
        cell_runs = [run for run in runs if run.cell == arm.cell]
        for name in _probe_names(cell_runs):
            if added := _probe_traces(cell_runs, name, arm.variant, styles[arm.variant]):
                traces.setdefault(name, []).extend(added)
    order = [name for name in PROBE_TITLES if name in traces] + sorted(traces.keys() - PROBE_TITLES.keys())
    return {
        name: {"data": traces[name], "layout": training_layout(traces[name]) | {"height": 290}}
        for name in order
    }


def probe_title(name: str) -> str:
    return PROBE_TITLES.get(name) or name.replace("_", " ").capitalize()


def _probe_names(runs: Sequence[RunData]) -> list[str]:
    known = {"kind", "step", "tokens", "seconds"}
    return sorted({name for run in runs for row in run.metrics.get("probe", []) for name in row} - known)


def _probe_traces(
    runs: Sequence[RunData], name: str, variant: str, style: dict[str, str]
) -> list[dict[str, Any]]:
    """Draw means over seeds against tokens: of the mean over layers, and of every layer, hidden."""
    by_tokens = probe_values(runs, name)
    if not by_tokens:
        return []
    layers = min(len(values) for runs_values in by_tokens.values() for values in runs_values)
    xs = sorted(by_tokens)
    traces = []
    for layer in ("mean", *(range(layers) if layers > 1 else ())):
        ys = []
        for x in xs:
            values = [sum(v) / len(v) if layer == "mean" else v[int(layer)] for v in by_tokens[x]]
            ys.append(round_for_plot(sum(values) / len(values)))
        traces.append(
            {
                "type": "scatter",
                "mode": line_mode(xs),
                "name": plot_text(variant),
                "x": xs,
                "y": ys,
                "line": {"color": style["color"], "width": 2, "dash": style["dash"]},
                "meta": {"layer": str(layer)},
                "visible": layer == "mean",
                "hovertemplate": f"{plot_text(variant)}: %{{y:.4g}}<extra></extra>",
            }
        )
    return traces


def probe_values(runs: Sequence[RunData], name: str) -> dict[float, list[list[float]]]:
    """Return the values per layer of every run, by tokens."""
    by_tokens: dict[float, list[list[float]]] = {}
    for run in runs:
        for row in run.metrics.get("probe", []):
            values = row.get(name)
            values = values if isinstance(values, list) else [values]
            if values and all(isinstance(v, int | float) and math.isfinite(v) for v in values):
                by_tokens.setdefault(row["tokens"] if "tokens" in row else row["step"], []).append(values)
    return by_tokens


def line_mode(xs: Sequence[float]) -> str:
    """Return the mode of a trace: a single point has no line, so it gets a marker."""
    return "lines" if len(xs) > 1 else "markers"


def training_layout(traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the layout of figures against tokens: runs that were probed once have one tick."""
    layout = base_layout("training tokens")
    tokens = {x for trace in traces for x in trace["x"]}
    if len(tokens) == 1:
        layout["xaxis"] |= {"tickmode": "array", "tickvals": list(tokens)}
    return layout


def base_layout(x_title: str) -> dict[str, Any]:
    """Return the layout that figures share. Title and legend are text of the page above the figure."""
    axis = {"zeroline": False, "ticks": "outside", "ticklen": 4}
    return {
        # A fixed margin fits one line of ticks and a title; two automatic margins would oscillate.
        "xaxis": {**axis, "tickangle": 0, "title": {"text": x_title, "font": {"size": 12}, "standoff": 8}},
        "yaxis": {**axis, "automargin": True},
        "margin": {"l": 8, "r": 16, "t": 8, "b": 46},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "x unified",
        "showlegend": False,
    }


def plot_text(text: str) -> str:
    """Escape a name for plotly.js, which reads tags in the text of a figure, and templates in braces."""
    return escape(text, quote=False).replace("%{", "%\u200b{")


def round_for_plot(value: float) -> float:
    """Round to six digits, which halves the size of the page."""
    return float(f"{value:.6g}")


def transparent(color: str) -> str:
    """Return a color for areas behind lines."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.14)"
