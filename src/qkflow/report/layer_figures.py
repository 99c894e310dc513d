"""Heatmaps of probes over layers and training: gates of the slow path, scales of the circuits, pace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qkflow.report.figures import (
    PALETTE,
    Figure,
    plot_text,
    probe_values,
    round_for_plot,
    training_layout,
    transparent,
)

if TYPE_CHECKING:
    from qkflow.studies.results import StudySummary
    from qkflow.studies.run_data import RunData

HEATMAP_PROBES = (
    *("slow_gate", "slow_share", "qk_scale", "ov_scale", "effective_pace"),
    *("attention_entropy", "induction_score"),
)
MAX_COLUMNS = 60  # points of training


def layer_heatmaps(summary: StudySummary, runs: Sequence[RunData]) -> dict[str, Figure]:
    """Draw one heatmap per probe with layers: a trace per arm, of which the page shows one."""
    figures = {}
    for name in HEATMAP_PROBES:
        traces = []
        for arm in summary.arms:
            trace = _layer_trace([run for run in runs if run.cell == arm.cell], name, arm.variant)
            if trace:
                traces.append(trace)
        if traces:
            figures[name] = _heatmap_figure(name, traces)
    return figures


def heatmap_variants(figures: Sequence[Figure]) -> list[str]:
    """Return the variants that the reader can select."""
    return list(dict.fromkeys(trace["meta"]["variant"] for figure in figures for trace in figure["data"]))


def _layer_trace(runs: Sequence[RunData], name: str, variant: str) -> dict[str, Any] | None:
    by_tokens = probe_values(runs, name)
    layers = min((len(values) for each in by_tokens.values() for values in each), default=0)
    if layers < 2:
        return None
    tokens = sorted(by_tokens)
    tokens = tokens[:: -(-len(tokens) // MAX_COLUMNS)]
    means = [
        [round_for_plot(sum(values[layer] for values in by_tokens[x]) / len(by_tokens[x])) for x in tokens]
        for layer in range(layers)
    ]
    row = "gate" if name.startswith("slow_") else "layer"
    return {
        "type": "heatmap",
        "name": plot_text(variant),
        "meta": {"variant": variant},
        "x": tokens,
        "y": [f"{row} {layer}" for layer in range(layers)],
        "z": means,
        "hovertemplate": f"{plot_text(variant)}, %{{y}}, %{{x:,}} tokens: %{{z:.4g}}<extra></extra>",
    }


def _heatmap_figure(name: str, traces: list[dict[str, Any]]) -> Figure:
    values = [value for trace in traces for row in trace["z"] for value in row]
    scale = [[0, transparent(PALETTE[0])], [1, PALETTE[0]]]
    bar = {"thickness": 10, "outlinewidth": 0, "tickfont": {"size": 11}}
    shared = {"zmin": min(values), "zmax": max(values), "colorscale": scale, "colorbar": bar}
    for index, trace in enumerate(traces):
        trace |= {**shared, "visible": index == 0}
    rows = max(len(trace["y"]) for trace in traces)
    layout = training_layout(traces) | {"height": 110 + 24 * rows, "hovermode": "closest"}
    layout["yaxis"] |= {"type": "category", "showgrid": False}
    layout["xaxis"] |= {"showgrid": False}
    return {"data": traces, "layout": layout}
