"""The figure of docs/scale.md, from the stored output of `qkflow plan scaling`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from figures.svg import BLUE, GREEN, ORANGE, figure, line, polyline, text

DATA = Path(__file__).parents[1] / "results" / "scaling-455m.json"
WIDTH, HEIGHT, TOP, BOTTOM, LEFT, PANEL, GAP = 810, 320, 48, 46, 56, 300, 90
COLORS = {"ddp": ORANGE, "fsdp": BLUE, "hsdp": GREEN}
HOURS, COST = BLUE, ORANGE
Scale = Callable[[float], float]


def render() -> str:
    """Return the figure: efficiency of one run (left), hours and cost of the study (right)."""
    data = json.loads(DATA.read_text("utf-8"))
    counts = [point["devices"] for point in data["cost"]]
    panels = (*_efficiency_panel(data, counts, LEFT), *_cost_panel(data, counts, LEFT + PANEL + GAP))
    label = "Simulated efficiency of one run and cost of a 455M study by number of devices"
    return figure(WIDTH, HEIGHT, label, panels)


def _efficiency_panel(data: dict[str, Any], counts: list[int], left: int) -> list[str]:
    x, y = _log_x(counts, left), _linear_y(0.5, 1.0)
    parts = [text(left, 18, "computation as a share of a step", weight="bold")]
    batch = f"{data['local_batch']} windows of {data['seq_len']} tokens per device"
    parts += [text(left, 34, batch), *_x_axis(counts, x)]
    for share in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        parts += [_rule(left, y(share)), text(left - 8, y(share) + 4, f"{share:.0%}", "end")]
    for mode, color in COLORS.items():
        points = [point for point in data["scaling"] if point["parallel"] == mode]
        parts.append(polyline([(x(p["devices"]), y(p["efficiency"])) for p in points], color))
        last = points[-1]
        parts.append(text(x(last["devices"]) + 6, y(last["efficiency"]) + 4, mode, color=color))
    return parts


def _cost_panel(data: dict[str, Any], counts: list[int], left: int) -> list[str]:
    x = _log_x(counts, left)
    hours, dollars = ([point[name] for point in data["cost"]] for name in ("hours", "usd"))
    y = _log_y(0.1, 10_000)
    price = data["hardware"]["usd_per_hour"]
    parts = [
        text(left, 18, "the whole study: hours and cost", weight="bold"),
        text(left, 34, f"18 runs of {data['model']}, {price:g} USD per device hour"),
        *_x_axis(counts, x),
    ]
    for value in (0.1, 1, 10, 100, 1000, 10_000):
        parts += [_rule(left, y(value)), text(left - 8, y(value) + 4, f"{value:,g}", "end")]
    for name, values, color in (("hours", hours, HOURS), ("USD", dollars, COST)):
        parts.append(polyline([(x(n), y(v)) for n, v in zip(counts, values, strict=True)], color))
        parts.append(text(x(counts[-1]) + 6, y(values[-1]) + 4, name, color=color))
    return parts


def _log_x(counts: list[int], left: int) -> Scale:
    return lambda n: round(left + PANEL * math.log2(n) / math.log2(counts[-1]), 1)


def _linear_y(low: float, high: float) -> Scale:
    return lambda value: round(HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)


def _log_y(low: float, high: float) -> Scale:
    linear = _linear_y(math.log10(low), math.log10(high))
    return lambda value: linear(math.log10(value))


def _x_axis(counts: list[int], x: Scale) -> list[str]:
    labels = [text(x(n), HEIGHT - BOTTOM + 18, f"{n:,}", "middle") for n in counts[::3]]
    return [*labels, text(x(counts[6]), HEIGHT - BOTTOM + 36, "devices", "middle")]


def _rule(left: int, y: float) -> str:
    return line(left, y, left + PANEL, y)
