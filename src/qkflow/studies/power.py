"""Power: the smallest effect that n seeds can show, and the seeds that would decide an undecided arm.

Differences of n seeds with standard deviation s are tested by a t-test at level α/m, the first step of Holm's
correction over m arms. Its power follows from the noncentral t distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    mean: float, sd: float, n_comparisons: int, design: SeedDesign, power: float = POWER
) -> int | None:
    """Return the seeds with which a new study decides an arm with this mean and standard deviation.

    It is decided if it differs from zero, or lies within the margin. None: more than MAX_SEEDS are needed.
    """
    if sd == 0:
        return MIN_SEEDS_FOR_VERDICT
    tests = [abs(mean) / sd]
    level = [design.level / 2 / max(1, n_comparisons)]
    if design.margin is not None and abs(mean) < design.margin:
        tests.append((design.margin - abs(mean)) / sd)
        level.append(design.level / max(1, n_comparisons))
    for n in range(MIN_SEEDS_FOR_VERDICT, MAX_SEEDS + 1):
        if any(_power(effect, n, each) >= power for effect, each in zip(tests, level, strict=True)):
            return n
    return None


def pooled_sd(sds: Sequence[float]) -> float | None:
    """Return the root mean square of standard deviations; None without any."""
    return math.sqrt(sum(sd * sd for sd in sds) / len(sds)) if sds else None


def _power(effect: float, seeds: int, level: float) -> float:
    """Return the power of a one-sided t-test for a mean of `effect` standard deviations."""
    from scipy import stats

    critical = stats.t.isf(level, seeds - 1)
    return float(stats.nct.sf(critical, seeds - 1, effect * math.sqrt(seeds)))
