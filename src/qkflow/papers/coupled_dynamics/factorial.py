"""Which part of an init makes the symmetric init gain? A factorial over four parts of the init.

The stored study `symmetric-factorial` trains standard attention from every combination of two values for W_Q
and W_K, W_V, the residual outputs and the embedding, each without and with a symmetric part of the same
score. The gain of the symmetric part is averaged over the combinations in which a part has one value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from qkflow.attention.init import InitScheme
from qkflow.papers.claims import Results, judge_differences, seed_design
from qkflow.report.tables import format_change
from qkflow.studies import Comparison
from qkflow.studies.stats import PairedDifference

RECORD = "symmetric-factorial"
PARTS = {
    "qk": "W_Q and W_K",
    "ov": "W_V",
    "out": "residual outputs",
    "embed": "embedding",
}

Losses = np.ndarray  # of the judged seeds


@dataclass(frozen=True)
class Cell:
    """An init of the factorial: the parts that differ from the base, and whether W_Q has a symmetric part."""

    changed: frozenset[str]
    is_symmetric: bool


@dataclass(frozen=True)
class PartEffect:
    """What a part of the init does, by its value, averaged over the values of the other parts.

    alone      the other value against the base, without a symmetric part
    gains      the symmetric part against none, where the part has the base's value, and the other one
    contrast   the second gain against the first; negative: the symmetric part gains more with the other value
    """

    part: str
    values: tuple[str, str]
    alone: PairedDifference
    gains: tuple[PairedDifference, PairedDifference]
    contrast: PairedDifference


def part_effects(comparison: Comparison) -> list[PartEffect]:
    """Return the effect of every part, from the seeds that all cells share."""
    losses, values = _read_losses(comparison)
    design = seed_design(comparison)

    def mean(part: str, changed: bool, symmetric: bool) -> Losses:
        """Average the losses over the values of the other parts."""
        chosen = [
            each
            for cell, each in losses.items()
            if (part in cell.changed) is changed and cell.is_symmetric is symmetric
        ]
        return np.mean(chosen, axis=0)

    def difference(first: Losses, second: Losses) -> PairedDifference:
        return design.difference(first.tolist(), second.tolist())

    effects = []
    for part in PARTS:
        base, base_symmetric = mean(part, False, False), mean(part, False, True)
        other, other_symmetric = mean(part, True, False), mean(part, True, True)
        effects.append(
            PartEffect(
                part,
                values[part],
                alone=difference(other, base),
                gains=(difference(base_symmetric, base), difference(other_symmetric, other)),
                contrast=difference(other_symmetric - other, base_symmetric - base),
            )
        )
    return effects


def factorial_rows(results: Results) -> list[dict[str, str]]:
    """Return one row per part. The verdicts of the contrasts are corrected together (Holm)."""
    comparison = results.comparison(RECORD)
    effects = part_effects(comparison)
    judged = judge_differences(comparison, {effect.part: effect.contrast for effect in effects})
    rows = []
    for effect in effects:
        base, other = effect.values
        contrast, verdict = judged[effect.part]
        rows.append(
            {
                "part": PARTS[effect.part],
                "values": f"`{base}`, `{other}`",
                "change by the second value (95%)": format_change(effect.alone),
                "symmetric init, first value": format_change(effect.gains[0]),
                "symmetric init, second value": format_change(effect.gains[1]),
                "second against first": format_change(contrast),
                "verdict": str(verdict),
            }
        )
    return rows


def _read_losses(comparison: Comparison) -> tuple[Mapping[Cell, Losses], Mapping[str, tuple[str, str]]]:
    """Return the losses of every cell on the shared seeds, and the two values of every part."""
    arms = [(InitScheme.parse(arm.best_init), arm.losses) for arm in comparison.summary.arms if arm.losses]
    seeds = sorted(frozenset.intersection(*(frozenset(losses) for _, losses in arms)))
    values: dict[str, tuple[str, str]] = {}
    cells: dict[Cell, Losses] = {}
    for init, losses in arms:
        changed = dict(init.parts)
        values |= {part: (init.base, value) for part, value in changed.items()}
        cells[Cell(frozenset(changed), init.modifier is not None)] = np.array(
            [losses[each] for each in seeds]
        )
    assert len(cells) == 2 ** (len(PARTS) + 1), "not a full factorial"
    return cells, values
