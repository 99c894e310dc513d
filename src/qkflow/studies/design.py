"""The design of a study: how many seeds, when they are looked at, and which tests decide.

Every arm has several cells (one per init), and so has the pool of baselines. *Screening seeds* choose the
leader of each arm; the *judged seeds*, which had no part in that choice, decide. An arm helps if its leader
beats every baseline that is still in the race, and hurts if all of its cells that are still in the race are
worse than the leading baseline. Both are intersection-union tests (Berger 1982): the largest p-value counts,
and no correction for the number of inits is needed, however many there are on either side.

The p-values (`SeedDesign.test`) and the verdicts (`decide`) work on arrays of many studies as well, so that
`calibration` simulates the code that judges a real study.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from qkflow.studies.sequential import nominal_levels, one_sided_p, p_by_look, planned_looks, sequential_p
from qkflow.studies.stats import PairedDifference, paired_difference, t_interval

Array = np.ndarray

SCREENING_SEEDS = 3
RETIREMENT_LEVEL = 0.02


class Verdict(StrEnum):
    """The outcome for one arm."""

    HELPS = "helps"
    HURTS = "hurts"
    EQUIVALENT = "equivalent"  # within the margin of the reference
    UNDECIDED = "undecided"
    NO_VERDICT = "no verdict"
    REFERENCE = "reference"


DECIDED = (Verdict.HELPS, Verdict.HURTS, Verdict.EQUIVALENT)


@dataclass(frozen=True)
class TestResult:
    """p-values of arms. `direction`: −1 where the evidence is for a lower loss, 1 for a higher one."""

    __test__ = False  # not a test of pytest

    p: Array  # two-sided, of a difference
    direction: Array
    p_equivalent: Array


@dataclass(frozen=True)
class SeedDesign:
    """Looks and tests of a study.

    looks       numbers of seeds at which the study looks; empty: once, at however many seeds there are
    confidence  of intervals; 1 − confidence is the family-wise rate of false verdicts
    margin      of equivalence, as a difference of losses; None: equivalence is not tested
    """

    looks: tuple[int, ...] = ()
    confidence: float = 0.95
    margin: float | None = None

    @classmethod
    def fixed(cls, confidence: float = 0.95, margin: float | None = None) -> SeedDesign:
        return cls((), confidence, margin)

    @classmethod
    def adaptive(cls, max_seeds: int, confidence: float = 0.95, margin: float | None = None) -> SeedDesign:
        return cls(planned_looks(max_seeds), confidence, margin)

    @property
    def level(self) -> float:
        return 1 - self.confidence

    def reached(self, pairs: int) -> tuple[int, ...]:
        """Return the looks that `pairs` seeds have reached."""
        return tuple(n for n in self.looks or (pairs,) if 2 <= n <= pairs)

    def test(self, leader: Sequence[Array], cells: Sequence[Array]) -> TestResult:
        """Test an arm after each of the K looks reached; the first difference of both lists is the leaders'.

        leader  losses of the arm's leader minus those of each baseline in the race, (…, n) each
        cells   losses of each cell of the arm in the race minus those of the leading baseline, (…, n) each
        """
        p_less = self.p_less(leader, 0.0)
        p_greater = self.p_less([-d for d in cells], 0.0)
        p = np.minimum(1.0, 2 * np.minimum(p_less, p_greater))
        if self.margin is None:
            return TestResult(p, np.where(p_less < p_greater, -1, 1), np.ones_like(p))
        # Two one-sided tests (TOST, Schuirmann 1987). Both must hold at the same look.
        bounds = [*(d - self.margin for d in leader), *(-d - self.margin for d in cells)]
        return TestResult(p, np.where(p_less < p_greater, -1, 1), self.p_less(bounds, 0.0))

    def p_less(self, differences: Sequence[Array], bound: float) -> Array:
        """Return p (…, K) of the test that the means of all differences (…, n) are below `bound`."""
        shortest = min(d.shape[-1] for d in differences)
        looks = self.looks or (shortest,)
        largest = np.max([p_by_look(d[..., :shortest] - bound, looks) for d in differences], axis=0)
        return sequential_p(largest, looks)

    def difference(
        self,
        variant: Sequence[float],
        reference: Sequence[float],
        leader: Sequence[Array] = (),
        cells: Sequence[Array] = (),
    ) -> PairedDifference:
        """Compare losses paired by position; interval and p-values are valid over all looks.

        `leader` and `cells` are further differences that the p-values must hold for, as in `test`.
        """
        result = paired_difference(variant, reference, self.confidence)
        d = np.asarray(variant, dtype=float) - np.asarray(reference, dtype=float)
        if not all(self.reached(len(each)) for each in (d, *leader, *cells)):
            return replace(result, p=None)
        tested = self.test([d, *leader], [d, *cells])
        low, high, _ = t_interval(d, self._coverage(len(d)))
        return replace(
            result,
            low=low,
            high=high,
            p=float(tested.p[-1]),
            direction=int(tested.direction[-1]),
            p_equivalent=None if self.margin is None else float(tested.p_equivalent[-1]),
        )

    def _coverage(self, pairs: int) -> float:
        """Return the confidence of the t-interval at the last look reached that holds over all looks."""
        if not self.looks:
            return self.confidence
        return 1 - 2 * float(nominal_levels(self.looks, self.level / 2)[len(self.reached(pairs)) - 1])


def in_the_race(leader: Array, cells: Array) -> Array:
    """Return whether each cell is not clearly worse than the leader of its arm.

    leader (…, n) and cells (…, C, n) are losses of the same seeds. A cell is retired if a one-sided paired
    t-test rejects at RETIREMENT_LEVEL, which is low: a retired cell can no longer stop a false verdict.
    """
    if cells.shape[-1] < 2:
        return np.ones(cells.shape[:-1], dtype=bool)
    return one_sided_p(leader[..., None, :] - cells) >= RETIREMENT_LEVEL


def decide(tested: TestResult, mean: Array, design: SeedDesign) -> Array:
    """Return the verdict of every arm from corrected p-values and the mean difference (negative is better).

    A significant difference inside the margin is a difference: helps and hurts come before equivalent. In an
    adaptive study a p-value may come from an earlier look; the mean of all seeds must agree with it.
    """
    different = tested.p < design.level
    inside = np.abs(mean) < (design.margin or 0.0)
    return np.select(
        [
            different & (tested.direction < 0) & (mean < 0),
            different & (tested.direction > 0) & (mean > 0),
            inside & (tested.p_equivalent < design.level),
        ],
        [Verdict.HELPS.value, Verdict.HURTS.value, Verdict.EQUIVALENT.value],
        Verdict.UNDECIDED.value,
    )
