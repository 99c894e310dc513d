"""Elements of SVG figures. The colors are readable on white and on dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

BLUE, ORANGE, GREEN, PURPLE, RULE, TEXT = "#0b5394", "#c25700", "#3b7d23", "#7b4ba0", "#b9c0c8", "#57606a"


def figure(width: int, height: int, label: str, parts: Sequence[str], font_size: int = 12) -> str:
    """Return a whole figure; `label` is its text alternative."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(label)}" font-family="system-ui, sans-serif" font-size="{font_size}">'
    )
    return "\n".join([head, *parts, "</svg>", ""])


def text(
    x: float, y: float, content: str, anchor: str = "start", weight: str = "normal", color: str = TEXT
) -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" fill="{color}"'
    return f'<text x="{x}" y="{y}" {style}>{escape(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, color: str = RULE, width: float = 0.6) -> str:
    return f'<line x1="{x1}" x2="{x2}" y1="{y1}" y2="{y2}" stroke="{color}" stroke-width="{width:g}"/>'


def polyline(points: Sequence[tuple[float, float]], color: str) -> str:
    path = " ".join(f"{x},{y}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>'
