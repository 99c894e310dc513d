"""Redraw the figure of docs/scale.md from the stored output of `qkflow plan scaling`: `make tables`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "results" / "scaling-455m.json"
FIGURE = ROOT / "docs" / "images" / "scaling.svg"
WIDTH, HEIGHT, TOP, BOTTOM, LEFT, PANEL, GAP = 810, 320, 48, 46, 56, 300, 90
COLORS = {"ddp": "#c25700", "fsdp": "#0b5394", "hsdp": "#3b7d23"}
HOURS, COST, RULE, TEXT = "#0b5394", "#c25700", "#b9c0c8", "#57606a"  # readable on white and on dark pages
Scale = Callable[[float], float]


def render(data: dict[str, Any]) -> str:
    """Return the figure: efficiency of one run (left), hours and cost of the study (right)."""
    counts = [point["devices"] for point in data["cost"]]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-label="Simulated efficiency of one run and cost of a 455M study by number of devices" '
        'font-family="system-ui, sans-serif" font-size="12">',
        *_efficiency_panel(data, counts, LEFT),
        *_cost_panel(data, counts, LEFT + PANEL + GAP),
        "</svg>",
        "",
    ]
    return "\n".join(parts)


def _efficiency_panel(data: dict[str, Any], counts: list[int], left: int) -> list[str]:
    x, y = _log_x(counts, left), _linear_y(0.5, 1.0)
    parts = [_text(left, 18, "computation as a share of a step", weight="bold")]
    batch = f"{data['local_batch']} windows of {data['seq_len']} tokens per device"
    parts += [_text(left, 34, batch), *_x_axis(counts, x)]
    for share in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        parts += [_rule(left, y(share)), _text(left - 8, y(share) + 4, f"{share:.0%}", "end")]
    for mode, color in COLORS.items():
        points = [point for point in data["scaling"] if point["parallel"] == mode]
        parts.append(_line([(x(p["devices"]), y(p["efficiency"])) for p in points], color))
        last = points[-1]
        parts.append(_text(x(last["devices"]) + 6, y(last["efficiency"]) + 4, mode, color=color))
    return parts


def _cost_panel(data: dict[str, Any], counts: list[int], left: int) -> list[str]:
    x = _log_x(counts, left)
    hours, dollars = ([point[name] for point in data["cost"]] for name in ("hours", "usd"))
    y = _log_y(0.1, 10_000)
    price = data["hardware"]["usd_per_hour"]
    parts = [
        _text(left, 18, "the whole study: hours and cost", weight="bold"),
        _text(left, 34, f"18 runs of {data['model']}, {price:g} USD per device hour"),
        *_x_axis(counts, x),
    ]
    for value in (0.1, 1, 10, 100, 1000, 10_000):
        parts += [_rule(left, y(value)), _text(left - 8, y(value) + 4, f"{value:,g}", "end")]
    for name, values, color in (("hours", hours, HOURS), ("USD", dollars, COST)):
        parts.append(_line([(x(n), y(v)) for n, v in zip(counts, values, strict=True)], color))
        parts.append(_text(x(counts[-1]) + 6, y(values[-1]) + 4, name, color=color))
    return parts


def _log_x(counts: list[int], left: int) -> Scale:
    return lambda n: round(left + PANEL * math.log2(n) / math.log2(counts[-1]), 1)


def _linear_y(low: float, high: float) -> Scale:
    return lambda value: round(HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)


def _log_y(low: float, high: float) -> Scale:
    linear = _linear_y(math.log10(low), math.log10(high))
    return lambda value: linear(math.log10(value))


def _x_axis(counts: list[int], x: Scale) -> list[str]:
    labels = [_text(x(n), HEIGHT - BOTTOM + 18, f"{n:,}", "middle") for n in counts[::3]]
    return [*labels, _text(x(counts[6]), HEIGHT - BOTTOM + 36, "devices", "middle")]


def _rule(left: int, y: float) -> str:
    return f'<line x1="{left}" x2="{left + PANEL}" y1="{y}" y2="{y}" stroke="{RULE}" stroke-width="0.6"/>'


def _line(points: list[tuple[float, float]], color: str) -> str:
    path = " ".join(f"{x},{y}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>'


def _text(
    x: float, y: float, text: str, anchor: str = "start", weight: str = "normal", color: str = TEXT
) -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" fill="{color}"'
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'


def main() -> None:
    FIGURE.parent.mkdir(exist_ok=True)
    FIGURE.write_text(render(json.loads(DATA.read_text("utf-8"))), "utf-8")


if __name__ == "__main__":
    main()
