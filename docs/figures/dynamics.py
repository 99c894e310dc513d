"""What happens during training: probes of the stored ingredients study against tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from figures.svg import BLUE, GREEN, ORANGE, PURPLE, figure, line, polyline, text

from qkflow.papers.claims import Results, find_arm
from qkflow.papers.coupled_dynamics import arms
from qkflow.studies import Comparison

ARMS = {
    "standard, fan_in, AdamW": (arms.WEAK_REFERENCE, ORANGE),
    "+ euler": (arms.WEAK_EULER, PURPLE),
    "+ symmetric init": (arms.WEAK_SYMMETRIC, GREEN),
    "standard, modern, Muon": (arms.REFERENCE, BLUE),
}
PANELS = {
    "attention_entropy": "entropy of attention (nats)",
    "qk_symmetry": "symmetry of W_QᵀW_K",
    "previous_token_score": "attention on the previous token",
    "induction_score": "induction score",
}
WIDTH, PANEL, HEIGHT, LEFT, TOP, GAP = 760, 300, 150, 48, 62, 76


def render() -> str:
    """Return four panels, one probe each, means over seeds."""
    comparison = Results().comparison(arms.STUDY)
    parts, x = [], LEFT
    for label, (_, color) in ARMS.items():
        parts += [line(x, 16, x + 18, 16, color, 2), text(x + 24, 20, label)]
        x += 44 + round(6.6 * len(label))
    for index, (probe, title) in enumerate(PANELS.items()):
        left = LEFT + index % 2 * (PANEL + GAP)
        top = TOP + index // 2 * (HEIGHT + GAP)
        parts += _panel(comparison, probe, title, left, top)
    height = TOP + 2 * HEIGHT + GAP + 44
    return figure(WIDTH, height, "Probes of attention during training, by init and coupling", parts)


def _panel(comparison: Comparison, probe: str, title: str, left: int, top: int) -> list[str]:
    curves = {name: _mean_curve(comparison, name, probe) for name, _ in ARMS.values()}
    last = max(tokens[-1] for tokens, _ in curves.values())
    high = _round_up(max(max(values) for _, values in curves.values()))

    def x(tokens: float) -> float:
        return round(left + PANEL * tokens / last, 1)

    def y(value: float) -> float:
        return round(top + HEIGHT * (1 - value / high), 1)

    parts = [text(left, top - 12, title, weight="bold")]
    for value in np.linspace(0, high, 5):
        parts += [
            line(left, y(value), left + PANEL, y(value)),
            text(left - 6, y(value) + 4, f"{value:g}", "end"),
        ]
    for tokens in np.arange(0, last, 250_000)[1:]:
        parts.append(text(x(tokens), top + HEIGHT + 16, f"{tokens / 1000:g}k", "middle"))
    parts.append(text(left + PANEL, top + HEIGHT + 32, "training tokens", "end"))
    for name, color in ARMS.values():
        tokens, values = curves[name]
        parts.append(polyline([(x(t), y(v)) for t, v in zip(tokens, values, strict=True)], color))
    return parts


def _mean_curve(comparison: Comparison, name: str, probe: str) -> tuple[Sequence[int], Sequence[float]]:
    """Return tokens and the mean of a probe over heads and seeds; a score is that of the best head."""
    runs = comparison.runs_of(find_arm(comparison, name).cell)
    rows = [run.metrics["probe"] for run in runs]
    reduce = np.max if probe.endswith("_score") else np.mean
    values = [[float(reduce(row[probe])) for row in run] for run in rows]
    return [row["tokens"] for row in rows[0]], list(np.mean(values, axis=0))


def _round_up(value: float) -> float:
    """Return the next number with one or two significant digits that is a multiple of a tick."""
    unit = 10.0 ** math.floor(math.log10(max(value, 1e-9)))
    return next(factor * unit for factor in (1, 2, 4, 6, 8, 10) if factor * unit >= value)
