"""The figures of a report, as plain Plotly dicts: the page draws them, so making them needs no Plotly.

A variant has one colour everywhere (after Okabe & Ito 2008, told apart by colour-blind readers), the
reference is grey. Text and grid colours are set by the page, which knows whether it is light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qkflow.report.tables import all_rows, format_number
from qkflow.studies.stats import perplexity_percent_change

if TYPE_CHECKING:
    from qkflow.studies.analysis import RunData

REFERENCE_COLOR = "#808080"
PALETTE = ("#1A80C4", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#A6761D", "#8C6BB1")
DASHES = ("solid", "dash", "dashdot", "longdash")  # once the colours are used up

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
    "effective_pace": "Effective pace (‖ΔQK‖/‖QK‖)/(‖ΔOV‖/‖OV‖)",
    "qk_change": "Way of QK from its start ‖ΔQK‖/‖QK‖",
    "ov_change": "Way of OV from its start ‖ΔOV‖/‖OV‖",
    "ov_balance": "Balance ‖W_OᵀW_O − W_VW_Vᵀ‖",
    "slow_gate": "Gate |g|",
    "slow_share": "Slow share ‖g⊙ũ‖/‖x‖",
    "slow_grad_norm": "Slow gradient norm",
    "slow_grad_share": "Slow share of the gradient norm",
}

Figure = dict[str, Any]
Curve = list[tuple[float, float, float, float]]  # (step, tokens, seconds, loss)


def variant_styles(summary: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Colour and dash of every variant, the same in all figures."""
    found = {}
    for i, row in enumerate(summary["variants"]):
        found[row["variant"]] = {
            "color": PALETTE[i % len(PALETTE)],
            "dash": DASHES[i // len(PALETTE) % len(DASHES)],
        }
    if summary["reference"]:
        found[summary["reference"]["variant"]] = {"color": REFERENCE_COLOR, "dash": "solid"}
    return found


def differences_figure(summary: dict[str, Any]) -> Figure | None:
    """Every variant at its best start against the reference: mean, interval, and each seed above it."""
    rows = [row for row in reversed(summary["variants"]) if row["difference"]]
    style, traces = variant_styles(summary), []
    for place, row in enumerate(rows):
        colour = style[row["variant"]]["color"]
        traces.append(_seed_trace(row, summary["reference"], place + 0.24, colour))
        name = f"{row['variant']} from {row['best_init']}"
        traces.append(_interval_trace(row["difference"], place, colour, name, emphasized=True))
    return _rows_figure(traces, [row["variant"] for row in rows], row_height=62) if rows else None


def same_init_figure(summary: dict[str, Any]) -> Figure | None:
    """Every variant from every start, against the standard model from that start."""
    style, traces = variant_styles(summary), []
    names: list[str] = []
    for row in reversed(summary["variants"]):
        for start in reversed(row["by_init"]):
            if start["same_init_difference"]:
                name = f"{row['variant']} · {start['against'].partition('@')[2]}"
                colour = style[row["variant"]]["color"]
                traces.append(
                    _interval_trace(start["same_init_difference"], len(names), colour, name, emphasized=False)
                )
                names.append(name)
    return _rows_figure(traces, names, row_height=34) if names else None


def _rows_figure(traces: list[dict[str, Any]], names: list[str], row_height: int) -> Figure:
    layout = base_layout("perplexity, % (left is better)")
    layout["xaxis"] |= {"zeroline": True, "ticksuffix": "%"}
    layout["yaxis"] |= {
        "tickmode": "array",
        "tickvals": list(range(len(names))),
        "ticktext": names,
        "range": [-0.6, len(names) - 0.4],
        "showgrid": False,
        "ticks": "",
    }
    layout |= {"height": 80 + row_height * len(names), "hovermode": "closest"}
    return {"data": traces, "layout": layout}


def _interval_trace(
    difference: dict[str, Any], y: float, color: str, text: str, emphasized: bool
) -> dict[str, Any]:
    mean, low, high = (difference["percent"][name] for name in ("mean", "low", "high"))
    bars = {}
    said = f"{text}<br>{format_number(mean, '+.2f')}%"
    if mean is not None and low is not None and high is not None:
        bars = {
            "type": "data",
            "symmetric": False,
            "array": [high - mean],
            "arrayminus": [mean - low],
            "thickness": 3 if emphasized else 2,
            "width": 7 if emphasized else 5,
            "color": color,
        }
        said += f" ({format_number(low, '+.2f')} to {format_number(high, '+.2f')})"
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [mean],  # nothing is drawn where that is more than a number can hold
        "y": [y],
        "error_x": bars,
        "marker": {
            "color": color,
            "size": 12 if emphasized else 8,
            "symbol": "circle" if emphasized else "diamond",
        },
        "hovertemplate": said + "<extra></extra>",
    }


def _seed_trace(row: dict[str, Any], reference: dict[str, Any], y: float, color: str) -> dict[str, Any]:
    """Each seed's own difference, small."""
    ours = dict(zip(row["seeds"], row["loss_by_seed"], strict=True))
    theirs = dict(zip(reference["seeds"], reference["loss_by_seed"], strict=True))
    seeds = sorted(ours.keys() & theirs.keys())
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [perplexity_percent_change(ours[seed] - theirs[seed]) for seed in seeds],
        "y": [y] * len(seeds),
        "marker": {"color": color, "size": 6, "opacity": 0.55},
        "text": [f"{row['variant']}, seed {seed}" for seed in seeds],
        "hovertemplate": "%{text}: %{x:+.2f}%<extra></extra>",
    }


def loss_curve_figure(summary: dict[str, Any], runs: Sequence[RunData], axis: str) -> Figure | None:
    """Validation loss against `tokens` or `seconds`: mean over seeds with the range of the seeds behind it.

    Starts other than a variant's best are there but hidden; the page can show them.
    """
    style, traces, late = variant_styles(summary), [], []
    drawn: set[str] = set()
    for row in all_rows(summary):
        for start in sorted(row["by_init"], key=lambda start: start["cell"] != row["cell"]):
            curve = _mean_eval_curve([run for run in runs if run.cell == start["cell"]], axis)
            if not curve or start["cell"] in drawn:  # one cell may be a start of two arms
                continue
            drawn.add(start["cell"])
            best = start["cell"] == row["cell"]
            name = f"{row['variant']} from {start['init']}"
            traces += band_and_line_traces(curve, name, style[row["variant"]], best)
            late += [point[1] for point in curve if best and point[0] >= 0.2 * curve[-1][0]]
    if not traces:
        return None
    unit = {
        "tokens": "training tokens",
        "seconds": "training seconds, at a run’s undisturbed speed",
    }[axis]
    layout = base_layout(unit) | {"height": 380}
    if late:
        room = 0.06 * (max(late) - min(late)) + 1e-3
        layout["yaxis"]["range"] = [min(late) - room, max(late) + room]  # a double click shows all
    return {"data": traces, "layout": layout}


def perplexity_gap_figure(summary: dict[str, Any], runs: Sequence[RunData]) -> Figure | None:
    """How far each variant is from the reference after equally many tokens, all through training."""
    style, traces = variant_styles(summary), []
    reference = summary["reference"]
    if reference is None:
        return None
    base = {run.seed: run.curve() for run in runs if run.cell == reference["cell"]}
    for row in summary["variants"]:
        ours = _finished_or_all([run for run in runs if run.cell == row["cell"] != reference["cell"]])
        curves = [
            _perplexity_gap_curve(run.curve(), base[run.seed])
            for run in ours
            if base.get(run.seed) and run.curve()
        ]
        if curves:
            points = _mean_and_range(curves)
            traces += band_and_line_traces(points, row["variant"], style[row["variant"]], True, "%{y:+.2f}%")
    if not traces:
        return None
    layout = base_layout("training tokens") | {"height": 340}
    layout["yaxis"] |= {"zeroline": True, "ticksuffix": "%"}
    return {"data": traces, "layout": layout}


def _perplexity_gap_curve(ours: Curve, theirs: Curve) -> dict[float, tuple[float, float]]:
    """Per cent of perplexity by our step, where both have trained; their loss is interpolated in between.

    With equal time or FLOPs the two evaluate after different numbers of tokens.
    """
    tokens, losses = [point[1] for point in theirs], [point[3] for point in theirs]
    return {
        step: (seen, gap)
        for step, seen, _, loss in ours
        if tokens[0] <= seen <= tokens[-1]
        and (gap := perplexity_percent_change(loss - float(np.interp(seen, tokens, losses)))) is not None
    }


def _mean_and_range(
    curves: Sequence[dict[float, tuple[float, float]]],
) -> list[tuple[float, float, float, float]]:
    """(x, mean, lowest, highest) at every step all curves have, of curves of (x, value) by step."""
    points = []
    for step in sorted(set.intersection(*map(set, curves))):
        xs, values = zip(*(curve[step] for curve in curves), strict=True)
        mean = sum(value / len(values) for value in values)  # the sum itself may be too large for a number
        points.append((sum(xs) / len(xs), mean, min(values), max(values)))
    return points


def _finished_or_all(runs: Sequence[RunData]) -> Sequence[RunData]:
    """The finished runs: a mean goes as far as its shortest curve, one just begun would hide the others."""
    return [run for run in runs if run.status == "finished"] or runs


def _mean_eval_curve(runs: Sequence[RunData], axis: str) -> list[tuple[float, float, float, float]]:
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
    xs = [_round_for_plot(point[0]) for point in points]
    line = {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": xs,
        "y": [_round_for_plot(point[1]) for point in points],
        "line": {"color": style["color"], "width": 2.4, "dash": style["dash"] if is_best else "dot"},
        "visible": is_best,
        "meta": {"best": is_best},
        "hovertemplate": f"{name}: {hover_format}<extra></extra>",
    }
    if not is_best or len(points) < 2:
        return [line]
    band = {
        "type": "scatter",
        "mode": "lines",
        "x": xs + xs[::-1],
        "y": [_round_for_plot(point[3]) for point in points]
        + [_round_for_plot(point[2]) for point in points[::-1]],
        "fill": "toself",
        "fillcolor": _transparent(style["color"]),
        "line": {"width": 0},
        "meta": {"best": True},
        "hoverinfo": "skip",
    }
    return [band, line]


def probe_figures(summary: dict[str, Any], runs: Sequence[RunData]) -> dict[str, Figure]:
    """One small figure per probe, known ones first: its mean over layers, and every layer switched off."""
    style = variant_styles(summary)
    found: dict[str, list[dict[str, Any]]] = {}
    for row in all_rows(summary):
        cell = [run for run in runs if run.cell == row["cell"]]
        for name in _probe_names(cell):
            traces = _probe_traces(cell, name, row["variant"], style[row["variant"]])
            if traces:
                found.setdefault(name, []).extend(traces)
    order = [name for name in PROBE_TITLES if name in found] + sorted(found.keys() - PROBE_TITLES.keys())
    figures = {}
    for name in order:
        figures[name] = {"data": found[name], "layout": base_layout("training tokens") | {"height": 290}}
    return figures


def probe_title(name: str) -> str:
    return PROBE_TITLES.get(name) or name.replace("_", " ").capitalize()


def _probe_names(runs: Sequence[RunData]) -> list[str]:
    known = {"kind", "step", "tokens", "seconds"}
    return sorted({name for run in runs for row in run.metrics.get("probe", []) for name in row} - known)


def _probe_traces(
    runs: Sequence[RunData], name: str, variant: str, style: dict[str, str]
) -> list[dict[str, Any]]:
    """Mean over seeds against tokens: of the mean over layers, and of every layer."""
    sums: dict[float, list[list[float]]] = {}
    for run in runs:
        for row in run.metrics.get("probe", []):
            values = row.get(name)
            values = values if isinstance(values, list) else [values]
            if values and all(isinstance(v, int | float) and math.isfinite(v) for v in values):
                sums.setdefault(row.get("tokens", row["step"]), []).append(values)
    if not sums:
        return []
    layers = min(len(values) for many in sums.values() for values in many)
    xs = sorted(sums)
    traces = []
    for layer in ("mean", *(range(layers) if layers > 1 else ())):
        ys = []
        for x in xs:
            picked = [sum(v) / len(v) if layer == "mean" else v[int(layer)] for v in sums[x]]
            ys.append(_round_for_plot(sum(picked) / len(picked)))
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": xs,
                "y": ys,
                "line": {"color": style["color"], "width": 2, "dash": style["dash"]},
                "meta": {"layer": str(layer)},
                "visible": layer == "mean",
                "hovertemplate": f"{variant}: %{{y:.4g}}<extra></extra>",
            }
        )
    return traces


def base_layout(x_title: str) -> dict[str, Any]:
    """What is plotted stands above a figure, as text of the page; so does the legend."""
    axis = {"zeroline": False, "ticks": "outside", "ticklen": 4}
    return {
        # One line of ticks and a title fit a fixed margin; two that adapt would adapt to each other.
        "xaxis": {**axis, "tickangle": 0, "title": {"text": x_title, "font": {"size": 12}, "standoff": 8}},
        "yaxis": {**axis, "automargin": True},
        "margin": {"l": 8, "r": 16, "t": 8, "b": 46},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "x unified",
        "showlegend": False,
    }


def _round_for_plot(value: float) -> float:
    """Six digits are more than a plot can show, and half the page's size."""
    return float(f"{value:.6g}")


def _transparent(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.14)"
