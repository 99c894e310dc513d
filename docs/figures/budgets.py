"""Gains by budget: the change of perplexity against training tokens, each budget with its own schedule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from figures.svg import BLUE, GREEN, ORANGE, PURPLE, figure, line, text

from qkflow.papers.claims import Results
from qkflow.papers.coupled_dynamics.token_budgets import GAINS, Point, read_points
from qkflow.report.document import format_count
from qkflow.studies.stats import perplexity_percent_change

# panel title, and the color of each gain that it shows
PANELS = {
    "against standard, fan_in, AdamW": {
        "euler, fan_in, AdamW": ORANGE,
        "symmetric init, fan_in, AdamW": GREEN,
        "modern and Muon instead of fan_in and AdamW": PURPLE,
    },
    "against standard, modern, Muon": {
        "euler, modern, Muon": ORANGE,
        "differential, modern, Muon": BLUE,
        "increasing pace, modern, Muon": GREEN,
    },
}
WIDTH, PANEL, HEIGHT, LEFT, TOP, GAP = 760, 300, 180, 48, 40, 76
Series = dict[str, list[Point]]


def render() -> str:
    """Return two panels, one per baseline, with 95% intervals."""
    results = Results()
    series = {gain.label: read_points(results, gain) for gain in GAINS}
    budgets = sorted({point.tokens for points in series.values() for point in points})
    parts: list[str] = []
    for index, (title, colors) in enumerate(PANELS.items()):
        shown = {label: series[label] for label in colors}
        parts += _panel(title, shown, colors, budgets, LEFT + index * (PANEL + GAP))
    height = TOP + HEIGHT + 44 + 18 * max(len(colors) for colors in PANELS.values())
    return figure(WIDTH, height, "Change of perplexity by budget of training tokens", parts)


def _panel(
    title: str, series: Series, colors: dict[str, str], budgets: Sequence[float], left: int
) -> list[str]:
    bounds = [
        bound
        for points in series.values()
        for point in points
        for bound in (point.difference.low, point.difference.high, 0.0)
        if bound is not None
    ]
    step = _tick_step(min(bounds), max(bounds))
    low, high = (
        step * rounded(perplexity_percent_change(bound) / step)
        for rounded, bound in ((math.floor, min(bounds)), (math.ceil, max(bounds)))
    )
    span = math.log(budgets[-1] / budgets[0])

    def x(tokens: float) -> float:
        return round(left + 12 + (PANEL - 24) * math.log(tokens / budgets[0]) / span, 1)

    def y(difference: float) -> float:
        percent = perplexity_percent_change(difference)
        return round(TOP + HEIGHT * (high - percent) / (high - low), 1)

    parts = [text(left, TOP - 16, title, weight="bold")]
    for value in np.arange(low, high + step / 2, step):
        height = round(TOP + HEIGHT * (high - value) / (high - low), 1)
        parts += [
            line(left, height, left + PANEL, height),
            text(left - 6, height + 4, f"{value:g}%".replace("-", "−"), "end"),
        ]
    for tokens in budgets:
        parts.append(text(x(tokens), TOP + HEIGHT + 16, format_count(tokens), "middle"))
    parts.append(text(left + PANEL, TOP + HEIGHT + 32, "training tokens", "end"))
    for index, (label, points) in enumerate(series.items()):
        color, row = colors[label], TOP + HEIGHT + 50 + 18 * index
        parts += [line(left, row, left + 18, row, color, 2), text(left + 24, row + 4, label)]
        ends = [(x(point.tokens), y(point.difference.mean)) for point in points]
        parts += [line(*a, *b, color, 1.5) for a, b in itertools.pairwise(ends)]
        for point, (center, middle) in zip(points, ends, strict=True):
            if point.difference.low is not None and point.difference.high is not None:
                parts.append(
                    line(center, y(point.difference.low), center, y(point.difference.high), color, 1.5)
                )
            parts.append(f'<circle cx="{center}" cy="{middle}" r="3" fill="{color}"/>')
    return parts


def _tick_step(low: float, high: float) -> int:
    """Return a step of about five ticks for a range of differences in nats, in percent."""
    percent = perplexity_percent_change(high) - perplexity_percent_change(low)
    return next(step for step in (1, 2, 5, 10, 20, 50, 100) if percent / step <= 6)
