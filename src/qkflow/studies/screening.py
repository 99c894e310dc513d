"""Cells of an arm and their screening: which init is best, and which are still in the race.

A cell is one model with one init. The screening seeds choose the leader of an arm (lowest mean loss) and
retire cells that are clearly worse than it. Judged seeds take no part in this, so that the choice of an init
cannot favor the arm that makes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from qkflow.studies.design import SeedDesign, in_the_race
from qkflow.studies.stats import PairedDifference


@dataclass
class CellData:
    """Final losses (or other scores, lower is better) of one cell by seed, of finished runs only."""

    name: str
    init: str
    same_init_baseline: str = ""
    variant: str = ""
    lr: float | None = None
    screened: dict[int, float] = field(default_factory=dict)
    judged: dict[int, float] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)  # judged seeds whose run failed, e.g. diverged
    loss: float | None = None  # mean loss over the screening seeds, else over the judged ones

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
    def rivals(self) -> list[CellData]:
        """The cells in the race besides the leader; one whose judged run failed is out."""
        return [cell for cell in self.racing[1:] if not cell.failed]

    def has_ended(self, n_seeds: int) -> bool:
        """Whether `n_seeds` judged runs of the leader and of every rival have finished or failed."""
        return all(len(cell.judged) + len(cell.failed) >= n_seeds for cell in (self.leader, *self.rivals))

    def difference(self, other: Screening, design: SeedDesign) -> PairedDifference | None:
        """Return the difference of the leaders, with p-values that hold for all cells in the race."""
        pair = paired_losses(self.leader.judged, other.leader.judged)
        if not pair[0]:
            return None
        leader, cells = self.leader_differences(other)[1:], self.cell_differences(other)[1:]
        return design.difference(*pair, leader=leader, cells=cells)

    def leader_differences(self, other: Screening) -> list[np.ndarray]:
        """Return the differences of the leader to the leader and all rivals of `other`."""
        return [_differences(self.leader, cell) for cell in (other.leader, *other.rivals)]

    def cell_differences(self, other: Screening) -> list[np.ndarray]:
        """Return the differences of the leader and all rivals to the leader of `other`."""
        return [_differences(cell, other.leader) for cell in (self.leader, *self.rivals)]


def screen(cells: Sequence[CellData]) -> Screening:
    """Return the leader by screening loss (without screening seeds: by judged loss) and its rivals."""
    leader = min(cells, key=CellData.sort_key)
    rivals = [cell for cell in cells if cell is not leader and _is_in_race(cell, leader)]
    return Screening(leader, (leader, *rivals))


def _is_in_race(cell: CellData, leader: CellData) -> bool:
    if len(cell.screened) < len(leader.screened):  # a run failed that did not fail for the leader
        return False
    seeds = sorted(cell.screened.keys() & leader.screened.keys())
    losses = np.asarray([[each.screened[seed] for seed in seeds] for each in (leader, cell)])
    return bool(in_the_race(losses[0], losses[1:])[0])


def paired_losses(a: Mapping[int, float], b: Mapping[int, float]) -> tuple[list[float], list[float]]:
    """Return the losses of two cells for the seeds that both have, in the order of the seeds."""
    seeds = sorted(a.keys() & b.keys())
    return [a[seed] for seed in seeds], [b[seed] for seed in seeds]


def _differences(cell: CellData, other: CellData) -> np.ndarray:
    return np.subtract(*paired_losses(cell.judged, other.judged))
