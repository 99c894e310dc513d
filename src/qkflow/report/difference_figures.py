"""Figures of differences between arms: with intervals, by init, and over learning rates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qkflow.report.figures import (
    PALETTE,
    REFERENCE_COLOR,
    Figure,
    base_layout,
    plot_text,
    round_for_plot,
    transparent,
    variant_styles,
)
from qkflow.report.tables import format_number
from qkflow.studies.power import detectable_effect
from qkflow.studies.stats import PairedDifference, perplexity_percent_change

if TYPE_CHECKING:
    from qkflow.studies.results import ArmSummary, StudySummary


def differences_figure(summary: StudySummary) -> Figure | None:
    """Draw every variant at its best init against the reference: mean, interval, and a dot per seed."""
    if summary.reference is None:
        return None
    styles, traces = variant_styles(summary), []
    names: list[str] = []
    for arm in reversed(summary.variants):
        if arm.difference:
            y, color = len(names), styles[arm.variant]["color"]
            label = f"{arm.variant} with {arm.best_init}"
            traces.append(_seed_trace(arm, summary.reference, y + 0.24, color))
            traces.append(interval_trace(arm.difference, y, color, label, emphasized=True))
            names.append(arm.variant)
    if not names:
        return None
    figure = rows_figure(traces, names, row_height=62, metric=summary.metric)
    if summary.noise_floor:
        figure["layout"]["shapes"] = [_noise_band(summary.noise_floor.difference)]
    return figure


def _noise_band(difference: PairedDifference) -> dict[str, Any]:
    """Return a band behind the rows: the interval of the A/A arm."""
    low, high = (difference.percent[name] for name in ("low", "high"))
    return {
        "type": "rect",
        "xref": "x",
        "yref": "paper",
        "x0": low,
        "x1": high,
        "y0": 0,
        "y1": 1,
        "fillcolor": transparent(REFERENCE_COLOR),
        "line": {"width": 0},
        "layer": "below",
    }


def power_figure(summary: StudySummary) -> Figure | None:
    """Draw the smallest difference that n seeds find, with the seeds of this study marked.

    An adaptive design adds seeds until it decides: it has no curve.
    """
    power, design = summary.power, summary.config.seed_design()
    if power is None or power.sd is None or design.looks or not power.n_comparisons:
        return None
    seeds = sorted({*range(3, 13), power.seeds, 16, 24, 32})
    sizes = [
        perplexity_percent_change(power.sd * detectable_effect(design, n, power.n_comparisons)) for n in seeds
    ]
    trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "smallest difference, %",
        "x": seeds,
        "y": [None if size is None else round_for_plot(size) for size in sizes],
        "line": {"color": PALETTE[0], "width": 2},
        "marker": {"size": [13 if n == power.seeds else 6 for n in seeds], "color": PALETTE[0]},
        "hovertemplate": "%{x} seeds: %{y:.3g}%<extra></extra>",
    }
    layout = base_layout("judged seeds (the large dot: this study)") | {"height": 260, "hovermode": "closest"}
    layout["xaxis"]["type"] = layout["yaxis"]["type"] = "log"
    ticks = {"tickmode": "array", "tickvals": [3, 4, 5, 6, 8, 12, 16, 24, 32]}
    layout["xaxis"] |= ticks
    percents = [scale * digit for scale in (0.01, 0.1, 1, 10) for digit in (1, 2, 5)]
    texts = [f"{percent:g}%" for percent in percents]
    layout["yaxis"] |= {"tickmode": "array", "tickvals": percents, "ticktext": texts}
    return {"data": [trace], "layout": layout}


def learning_rate_figure(summary: StudySummary) -> Figure | None:
    """Draw the final loss of every cell against its learning rate; the chosen rate is marked."""
    styles, traces = variant_styles(summary), []
    by_cell = {init.cell: arm for arm in summary.arms for init in arm.by_init}
    for search in summary.learning_rates:
        tried = [trial for trial in search.tried if trial.loss is not None]
        arm = by_cell.get(search.cell)
        if not tried or arm is None:
            continue
        style, is_best = styles[arm.variant], search.cell == arm.cell
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": plot_text(search.cell),
                "x": [trial.lr for trial in tried],
                "y": [trial.loss for trial in tried],
                "line": {"color": style["color"], "width": 2, "dash": style["dash"] if is_best else "dot"},
                "marker": {"size": [11 if trial.lr == search.chosen else 6 for trial in tried]},
                "opacity": 1.0 if is_best else 0.5,
                "hovertemplate": f"{plot_text(search.cell)}: %{{x:.3g}}, loss %{{y:.4f}}<extra></extra>",
            }
        )
    if not traces:
        return None
    layout = base_layout("learning rate") | {"height": 340, "hovermode": "closest"}
    layout["xaxis"]["type"] = "log"
    return {"data": traces, "layout": layout}


def same_init_figure(summary: StudySummary) -> Figure | None:
    """Draw every variant with every init against the baseline with the same init."""
    styles, traces = variant_styles(summary), []
    names: list[str] = []
    for arm in reversed(summary.variants):
        for init in reversed(arm.by_init):
            if init.same_init_difference:
                name = f"{arm.variant} · {init.against.partition('@')[2]}"
                color = styles[arm.variant]["color"]
                trace = interval_trace(init.same_init_difference, len(names), color, name, emphasized=False)
                traces.append(trace)
                names.append(name)
    return rows_figure(traces, names, row_height=34, metric=summary.metric) if names else None


def rows_figure(traces: list[dict[str, Any]], names: list[str], row_height: int, metric: str) -> Figure:
    layout = base_layout(f"{metric}, % (left is better)")
    layout["xaxis"] |= {"zeroline": True, "ticksuffix": "%"}
    layout["yaxis"] |= {
        "tickmode": "array",
        "tickvals": list(range(len(names))),
        "ticktext": [plot_text(name) for name in names],
        "range": [-0.6, len(names) - 0.4],
        "showgrid": False,
        "ticks": "",
    }
    layout |= {"height": 80 + row_height * len(names), "hovermode": "closest"}
    return {"data": traces, "layout": layout}


def interval_trace(
    difference: PairedDifference, y: float, color: str, text: str, emphasized: bool
) -> dict[str, Any]:
    mean, low, high = (difference.percent[name] for name in ("mean", "low", "high"))
    bars: dict[str, Any] = {}
    hover_text = f"{plot_text(text)}<br>{format_number(mean, '+.2f')}%"
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
        hover_text += f" ({format_number(low, '+.2f')} to {format_number(high, '+.2f')})"
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [mean],  # None, where exp overflows, draws nothing
        "y": [y],
        "error_x": bars,
        "marker": {
            "color": color,
            "size": 12 if emphasized else 8,
            "symbol": "circle" if emphasized else "diamond",
        },
        "hovertemplate": hover_text + "<extra></extra>",
    }


def _seed_trace(arm: ArmSummary, reference: ArmSummary, y: float, color: str) -> dict[str, Any]:
    """Draw the difference of each seed as a small dot."""
    losses, reference_losses = arm.losses, reference.losses
    seeds = sorted(losses.keys() & reference_losses.keys())
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [perplexity_percent_change(losses[seed] - reference_losses[seed]) for seed in seeds],
        "y": [y] * len(seeds),
        "marker": {"color": color, "size": 6, "opacity": 0.55},
        "text": [plot_text(f"{arm.variant}, seed {seed}") for seed in seeds],
        "hovertemplate": "%{text}: %{x:+.2f}%<extra></extra>",
    }
