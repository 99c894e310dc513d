"""Power: the smallest effect that n seeds can show, and the seeds that would decide an undecided arm.

Differences of n seeds with standard deviation s are tested by a t-test at level α/m, the first step of Holm's
correction over m arms. Its power follows from the noncentral t distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from qkflow.studies.design import SeedDesign
from qkflow.studies.sequential import nominal_levels
from qkflow.studies.stats import MIN_SEEDS_FOR_VERDICT

POWER = 0.8
MAX_SEEDS = 200  # more seeds than this are not proposed
_TOLERANCE = 1e-4


def detectable_effect(design: SeedDesign, seeds: int, n_comparisons: int, power: float = POWER) -> float:
    """Return the mean difference, in standard deviations of the differences, that is found with `power`.

    An adaptive design is counted at its last look, so its power is at least this.
    """
    level = design.level / 2 / max(1, n_comparisons)
    if design.looks:
        level = float(nominal_levels(design.looks, level)[-1])
    low, high = 0.0, 1.0
    while _power(high, seeds, level) < power:
        high *= 2
    while high - low > _TOLERANCE * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _power(middle, seeds, level) < power else (low, middle)
    return high


def seeds_to_decide(
    differences: Sequence[np.ndarray],
    bounds: Sequence[np.ndarray],
    n_comparisons: int,
    design: SeedDesign,
    power: float = POWER,
) -> int | None:
    """Return the seeds with which a study decides an arm whose means and deviations are as observed.

    It is decided if the means of all `differences` are below zero, or those of all `bounds` below the margin.
    None: more than MAX_SEEDS are needed.
    """
    level = design.level / max(1, n_comparisons)
    claims = [[(_effect(-d.mean(), d), level / 2) for d in differences]]
    if design.margin is not None:
        claims.append([(_effect(design.margin - d.mean(), d), level) for d in bounds])
    if design.looks:  # the level of the last look
        claims = [[(e, float(nominal_levels(design.looks, each)[-1])) for e, each in c] for c in claims]
    for n in range(MIN_SEEDS_FOR_VERDICT, MAX_SEEDS + 1):
        if any(all(_power(effect, n, each) >= power for effect, each in claim) for claim in claims):
            return n
    return None


def _effect(distance: float, differences: np.ndarray) -> float:
    """Return a distance from a bound in standard deviations."""
    sd = float(differences.std(ddof=1))
    return distance / sd if sd else math.copysign(math.inf, distance) if distance else 0.0


def pooled_sd(sds: Sequence[float]) -> float | None:
    """Return the root mean square of standard deviations; None without any."""
    return math.sqrt(sum(sd * sd for sd in sds) / len(sds)) if sds else None


def _power(effect: float, seeds: int, level: float) -> float:
    """Return the power of a one-sided t-test for a mean of `effect` standard deviations."""
    from scipy import stats

    if effect <= 0 or math.isinf(effect):
        return float(effect > 0)
    critical = stats.t.isf(level, seeds - 1)
    return float(stats.nct.sf(critical, seeds - 1, effect * math.sqrt(seeds)))
