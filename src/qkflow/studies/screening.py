"""Cells of an arm and their screening: which init is best, and which are still in the race.

A cell is one model with one init. The screening seeds choose the leader of an arm (lowest mean loss) and
retire cells that are clearly worse than it. Judged seeds take no part in this, so that the choice of an init
cannot favor the arm that makes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from qkflow.studies.design import in_the_race


@dataclass
class CellData:
    """Final losses of one cell, by seed: of finished runs only."""

    name: str
    init: str
    same_init_baseline: str = ""
    variant: str = ""
    lr: float | None = None
    screened: dict[int, float] = field(default_factory=dict)
    judged: dict[int, float] = field(default_factory=dict)

    def sort_key(self) -> tuple[int, float]:
        """Key to minimize: a cell with diverged seeds never ranks above one without."""
        losses = self.screened or self.judged
        return -len(losses), float(np.mean(list(losses.values()))) if losses else math.inf


@dataclass(frozen=True)
class Screening:
    """The leader of an arm, and all its cells in the race, the leader first."""

    leader: CellData
    racing: tuple[CellData, ...]

    @property
    def rivals(self) -> tuple[CellData, ...]:
        """The cells in the race besides the leader."""
        return self.racing[1:]


def screen(cells: Sequence[CellData]) -> Screening:
    """Return the leader by screening loss (without screening seeds: by judged loss) and its rivals."""
    leader = min(cells, key=CellData.sort_key)
    rivals = [cell for cell in cells if cell is not leader and _is_in_race(cell, leader)]
    return Screening(leader, (leader, *rivals))


def _is_in_race(cell: CellData, leader: CellData) -> bool:
    if len(cell.screened) < len(leader.screened):  # a seed diverged
        return False
    seeds = sorted(cell.screened.keys() & leader.screened.keys())
    losses = np.asarray([[each.screened[seed] for seed in seeds] for each in (leader, cell)])
    return bool(in_the_race(losses[0], losses[1:])[0])


def paired_losses(a: Mapping[int, float], b: Mapping[int, float]) -> tuple[list[float], list[float]]:
    """Return the losses of two cells for the seeds that both have, in the order of the seeds."""
    seeds = sorted(a.keys() & b.keys())
    return [a[seed] for seed in seeds], [b[seed] for seed in seeds]


def differences(cells: Iterable[CellData], reference: CellData) -> list[np.ndarray]:
    """Return the judged differences of each cell to `reference`; cells without pairs are left out."""
    pairs = [paired_losses(cell.judged, reference.judged) for cell in cells]
    return [np.subtract(*pair) for pair in pairs if pair[0]]
