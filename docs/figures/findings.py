"""The figure of the README: perplexity by optimizer, init and coupling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

import numpy as np
from figures.svg import BLUE, ORANGE, figure, line, text

from qkflow.papers.claims import Results, find_arm
from qkflow.papers.coupled_dynamics import arms
from qkflow.studies.stats import t_interval

# heading, then label and arm of the stored comparison
GROUPS: dict[str, dict[str, str]] = {
    "AdamW": {
        "standard, init fan_in": arms.WEAK_REFERENCE,
        "+ uncoupled networks": arms.UNCOUPLED,
        "+ euler coupling": arms.WEAK_EULER,
        "+ its linear drift alone": arms.WEAK_DRIFT,
        "+ symmetric init": arms.WEAK_SYMMETRIC,
        "standard, init modern": arms.ADAMW_MODERN,
    },
    "Muon": {
        "standard, init modern": arms.REFERENCE,
        "+ euler coupling": arms.EULER,
        "+ affine coupling": arms.AFFINE,
        "+ symmetric init": arms.SYMMETRIC,
        "+ differential scoring": arms.DIFFERENTIAL,
        "+ its norm alone": arms.SOFTMAX_NORM,
    },
}
ROW, LEFT, WIDTH, TOP, BOTTOM = 22, 190, 720, 46, 40
BASE, ADDED = BLUE, ORANGE


@dataclass(frozen=True)
class Point:
    """Geometric mean of the perplexity over seeds, with its 95% interval."""

    label: str
    mean: float
    low: float
    high: float


def read_points() -> dict[str, list[Point]]:
    comparison = Results().comparison("ingredients")
    groups: dict[str, list[Point]] = {}
    for heading, rows in GROUPS.items():
        for label, name in rows.items():
            losses = np.array(find_arm(comparison, name).loss_by_seed)
            low, high, _ = t_interval(losses, comparison.summary.config.confidence)
            mean = float(losses.mean())
            bounds = (mean if low is None else low, mean if high is None else high)
            groups.setdefault(heading, []).append(Point(label, *(math.exp(x) for x in (mean, *bounds))))
    return groups


def render() -> str:
    """Return the figure of the README as SVG: perplexity of every arm with its interval."""
    groups = read_points()
    points = [point for group in groups.values() for point in group]
    low = math.floor(min(point.low for point in points) / 10) * 10
    high = math.ceil(max(point.high for point in points) / 10) * 10
    height = TOP + (len(points) + len(groups)) * ROW + BOTTOM

    def x(value: float) -> float:
        share = math.log(value / low) / math.log(high / low)
        return round(LEFT + share * (WIDTH - LEFT - 30), 1)

    parts = [text(LEFT, 18, "validation perplexity, mean and 95% interval over seeds (lower is better)")]
    for tick in _ticks(low, high):
        parts.append(line(x(tick), TOP - 12, x(tick), height - BOTTOM))
        parts.append(text(x(tick), height - BOTTOM + 18, f"{tick:g}", "middle"))
    y = TOP
    for heading, group in groups.items():
        parts.append(text(10, y + 4, heading, weight="bold"))
        y += ROW
        for point in group:
            color = ADDED if point.label.startswith("+") else BASE
            parts.append(text(22 if color == BASE else 34, y + 4, point.label))
            parts.append(line(x(point.low), y, x(point.high), y, color, 2))
            parts.append(
                f'<circle cx="{x(point.mean)}" cy="{y}" r="4.5" fill="{color}">'
                f"<title>{escape(point.label)}: {point.mean:.1f} ({point.low:.1f}…{point.high:.1f})</title>"
                "</circle>"
            )
            y += ROW
    label = "Validation perplexity of standard attention and of couplings, by optimizer and init"
    return figure(WIDTH, height, label, parts, font_size=13)


def _ticks(low: float, high: float) -> list[int]:
    step = 10 if high - low <= 80 else 20
    return list(range(int(low), int(high) + 1, step))
