"""Redraw the figures of the documentation from stored results: `make tables`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from qkflow.papers.claims import Results, find_arm
from qkflow.papers.coupled_dynamics import claims as arms
from qkflow.studies.stats import t_interval

ROOT = Path(__file__).parents[1]
FINDINGS = ROOT / "docs" / "images" / "findings.svg"
# heading, then label and arm of the stored comparison
GROUPS: dict[str, dict[str, str]] = {
    "AdamW": {
        "standard, init fan_in": arms.WEAK_REFERENCE,
        "+ euler coupling": arms.WEAK_EULER,
        "+ symmetric init": arms.WEAK_SYMMETRIC,
        "standard, init modern": arms.ADAMW_MODERN,
    },
    "Muon": {
        "standard, init modern": arms.REFERENCE,
        "+ euler coupling": arms.EULER,
    },
}
ROW, LEFT, WIDTH, TOP, BOTTOM = 22, 190, 720, 46, 40
BASE, ADDED, RULE, TEXT = "#0b5394", "#c25700", "#b9c0c8", "#57606a"  # readable on white and on dark pages


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


def render_findings() -> str:
    """Return the figure of the README as SVG: perplexity of every arm with its interval."""
    groups = read_points()
    points = [point for group in groups.values() for point in group]
    low = math.floor(min(point.low for point in points) / 10) * 10
    high = math.ceil(max(point.high for point in points) / 10) * 10
    height = TOP + (len(points) + len(groups)) * ROW + BOTTOM

    def x(value: float) -> float:
        share = math.log(value / low) / math.log(high / low)
        return round(LEFT + share * (WIDTH - LEFT - 30), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="Validation perplexity of standard attention and of couplings, by optimizer and init" '
        'font-family="system-ui, sans-serif" font-size="13">',
        _text(LEFT, 18, "validation perplexity, mean and 95% interval over seeds (lower is better)"),
    ]
    for tick in _ticks(low, high):
        parts.append(
            f'<line x1="{x(tick)}" x2="{x(tick)}" y1="{TOP - 12}" y2="{height - BOTTOM}" stroke="{RULE}" '
            'stroke-width="0.6"/>'
        )
        parts.append(_text(x(tick), height - BOTTOM + 18, f"{tick:g}", "middle"))
    y = TOP
    for heading, group in groups.items():
        parts.append(_text(10, y + 4, heading, weight="bold"))
        y += ROW
        for point in group:
            color = ADDED if point.label.startswith("+") else BASE
            parts.append(_text(22 if color == BASE else 34, y + 4, point.label))
            parts.append(
                f'<line x1="{x(point.low)}" x2="{x(point.high)}" y1="{y}" y2="{y}" stroke="{color}" '
                'stroke-width="2"/>'
                f'<circle cx="{x(point.mean)}" cy="{y}" r="4.5" fill="{color}">'
                f"<title>{escape(point.label)}: {point.mean:.1f} ({point.low:.1f}…{point.high:.1f})</title>"
                "</circle>"
            )
            y += ROW
    return "\n".join([*parts, "</svg>", ""])


def _ticks(low: float, high: float) -> list[int]:
    step = 10 if high - low <= 80 else 20
    return list(range(int(low), int(high) + 1, step))


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}" fill="{TEXT}">'
        f"{escape(text)}</text>"
    )


def main() -> None:
    FINDINGS.parent.mkdir(exist_ok=True)
    FINDINGS.write_text(render_findings(), "utf-8")


if __name__ == "__main__":
    main()
