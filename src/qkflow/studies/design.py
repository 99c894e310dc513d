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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from qkflow.studies.sequential import nominal_levels, one_sided_p, planned_looks, sequential_p
from qkflow.studies.stats import MIN_SEEDS_FOR_VERDICT, PairedDifference, paired_difference, t_interval

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

    def test(self, leader: Sequence[Array], cells: Sequence[Array]) -> tuple[Array, Array]:
        """Return p of a difference and p of equivalence (…, K) after each of the K looks reached.

        leader  losses of the arm's leader minus those of each baseline in the race, (…, n) each
        cells   losses of each cell of the arm in the race minus those of the leading baseline, (…, n) each
        """
        p_less = _largest(self.p_less(d, 0.0) for d in leader)
        p_greater = _largest(self.p_less(-d, 0.0) for d in cells)
        p = np.minimum(1.0, 2 * np.minimum(p_less, p_greater))
        if self.margin is None:
            return p, np.ones_like(p)
        below = _largest(self.p_less(d, self.margin) for d in leader)
        above = _largest(self.p_less(-d, self.margin) for d in cells)
        return p, np.maximum(below, above)  # two one-sided tests (TOST, Schuirmann 1987)

    def p_less(self, d: Array, bound: float) -> Array:
        """Return p (…, K) of the one-sided test that the mean of d (…, n) is below `bound`."""
        return sequential_p(d - bound, self.looks or (d.shape[-1],))

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
        others = [*leader, *cells]
        if not all(self.reached(len(each)) for each in (d, *others)):
            return replace(result, p=result.p if not self.looks and not others else None)
        p, p_equivalent = self.test([d, *leader], [d, *cells])
        low, high, _ = t_interval(d, self._coverage(len(d)))
        return replace(
            result,
            low=low,
            high=high,
            p=float(p[-1]),
            p_equivalent=None if self.margin is None else float(p_equivalent[-1]),
        )

    def _coverage(self, pairs: int) -> float:
        """Return the confidence of the t-interval at the last look reached that holds over all looks."""
        if not self.looks:
            return self.confidence
        return 1 - 2 * float(nominal_levels(self.looks, self.level / 2)[len(self.reached(pairs)) - 1])


def _largest(p_values: Iterable[Array]) -> Array:
    """Return the elementwise largest p-value, at the looks that all have reached."""
    arrays = list(p_values)
    n_looks = min(p.shape[-1] for p in arrays)
    return np.max([p[..., :n_looks] for p in arrays], axis=0)


def in_the_race(leader: Array, cells: Array) -> Array:
    """Return whether each cell is not clearly worse than the leader of its arm.

    leader (…, n) and cells (…, C, n) are losses of the same seeds. A cell is retired if a one-sided paired
    t-test rejects at RETIREMENT_LEVEL, which is low: a retired cell can no longer stop a false verdict.
    """
    if cells.shape[-1] < 2:
        return np.ones(cells.shape[:-1], dtype=bool)
    return one_sided_p(leader[..., None, :] - cells) >= RETIREMENT_LEVEL


def decide(p_holm: Array, p_equivalent_holm: Array, mean: Array, level: float) -> Array:
    """Return the verdict of every arm from its corrected p-values and mean difference (negative is better).

    A significant difference inside the margin is a difference: helps and hurts come before equivalent.
    """
    different = p_holm < level
    return np.select(
        [different & (mean < 0), different, p_equivalent_holm < level],
        [Verdict.HELPS.value, Verdict.HURTS.value, Verdict.EQUIVALENT.value],
        Verdict.UNDECIDED.value,
    )


def decide_one(
    p_holm: float | None, p_equivalent_holm: float | None, mean: float, pairs: int, level: float
) -> Verdict:
    """Return the verdict of one arm; too few seeds give none."""
    if p_holm is None or pairs < MIN_SEEDS_FOR_VERDICT:
        return Verdict.NO_VERDICT
    p_equivalent = np.inf if p_equivalent_holm is None else p_equivalent_holm
    return Verdict(str(decide(np.asarray(p_holm), np.asarray(p_equivalent), np.asarray(mean), level)))
