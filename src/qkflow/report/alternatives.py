"""Text alternatives: every figure of a page as a small table."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any, NamedTuple

MAX_COLUMNS = 12  # of a heatmap; between the first and the last, evenly spaced ones are kept


class DataTable(NamedTuple):
    headings: list[str]
    rows: list[list[str]]  # the first cell is the heading of the row


def figure_table(figure: dict[str, Any]) -> DataTable:
    """Return the numbers of a figure: intervals as such, lines by their ends and range, heatmaps by cell."""
    traces = figure["data"]
    if any(trace["type"] == "heatmap" for trace in traces):
        return _heatmap_table(traces)
    if any(trace.get("error_x") for trace in traces):
        return _interval_table(traces, figure["layout"])
    return _line_table([trace for trace in traces if _is_shown(trace)])


def _is_shown(trace: dict[str, Any]) -> bool:
    """Whether a line is a row of the table: bands have no name, and single layers are in the heatmaps."""
    return bool(trace.get("name")) and trace.get("meta", {}).get("layer", "mean") == "mean"


def _line_table(traces: Sequence[dict[str, Any]]) -> DataTable:
    rows = []
    for trace in traces:
        points = [(x, y) for x, y in zip(trace["x"], trace["y"], strict=True) if y is not None]
        if points:
            low, high = min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1])
            cells = [_point(point) for point in (points[0], points[-1], low, high)]
            rows.append([html.unescape(trace["name"]), str(len(points)), *cells])
    return DataTable(["series", "points", "first (x: y)", "last", "lowest", "highest"], rows)


def _interval_table(traces: Sequence[dict[str, Any]], layout: dict[str, Any]) -> DataTable:
    labels = layout["yaxis"].get("ticktext", [])
    rows = []
    for trace in traces:
        if "error_x" not in trace:
            continue
        mean, bars = trace["x"][0], trace["error_x"]
        low, high = None, None
        if bars and mean is not None:
            low, high = mean - bars["arrayminus"][0], mean + bars["array"][0]
        label = trace.get("name") or labels[round(trace["y"][0])]
        rows.append([html.unescape(label), *(_number(value, "+.3g") for value in (mean, low, high))])
    return DataTable(["row", "mean, %", "low", "high"], rows[::-1])  # figures are drawn from below


def _heatmap_table(traces: Sequence[dict[str, Any]]) -> DataTable:
    kept = _spaced(len(traces[0]["x"]))
    has_names = any(trace.get("name") for trace in traces)
    rows = []
    for trace in traces:
        for label, values in zip(trace["y"], trace["z"], strict=True):
            prefix = f"{html.unescape(trace['name'])}, " if has_names else ""
            rows.append([f"{prefix}{label}", *(_number(values[i]) for i in kept if i < len(values))])
    return DataTable(["row", *(_text(traces[0]["x"][i]) for i in kept)], rows)


def _spaced(count: int) -> list[int]:
    if count <= MAX_COLUMNS:
        return list(range(count))
    return sorted({round(i * (count - 1) / (MAX_COLUMNS - 1)) for i in range(MAX_COLUMNS)})


def _point(point: tuple[Any, float]) -> str:
    return f"{_text(point[0])}: {_number(point[1])}"


def _text(value: Any) -> str:
    return _number(value) if isinstance(value, int | float) else str(value)


def _number(value: float | None, spec: str = ".4g") -> str:
    return "–" if value is None else format(value, spec).replace("-", "−")
