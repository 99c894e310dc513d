"""Group-sequential t-tests: p-values that stay valid when seeds are added until a verdict comes.

A study looks at its paired differences after n₁ < n₂ < … seeds. Testing each look at 5% would raise the rate
of false verdicts to about 17% (looks at 3 to 10 seeds). Here a look counts by its weight wₖ = nₖ/n_max, and
the test statistic is the smallest weighted p-value so far:

    S = min over looks of pₖ/wₖ        pₖ: one-sided t-test on the first nₖ differences

The p-value is the probability of an S this small over *all* planned looks under the null hypothesis. So it
can be read at any look and by any stopping rule, and it never increases. For normal differences the joint
distribution of the t-statistics does not depend on their variance, so the distribution of S is simulated
exactly, without the large-sample approximation of the usual boundaries, which fails at three seeds.

The construction is that of Lan & DeMets (1983) and of the repeated significance tests in Jennison & Turnbull
(2000); the boundary pₖ ≤ c·nₖ lies between Pocock's (constant) and O'Brien & Fleming's (late).
With one look the p-value is that of the t-test.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from qkflow.studies.stats import LOSS_ATOL, MIN_SEEDS_FOR_VERDICT

Array = np.ndarray

N_PATHS = 400_000  # simulated paths under the null hypothesis: at p = 0.002 the relative error is 3.5%
_BATCH = 50_000
_STREAM = 20_260_401  # seed of the simulation: equal data give equal p-values


def planned_looks(max_seeds: int) -> tuple[int, ...]:
    """Return the numbers of seeds at which an adaptive study looks: 3, 4, 5, 6, 8, 10, …, `max_seeds`."""
    early = range(MIN_SEEDS_FOR_VERDICT, min(6, max_seeds) + 1)
    late = range(8, max_seeds + 1, 2)
    return tuple(sorted({*early, *late, max_seeds}))


def one_sided_p(differences: Array) -> Array:
    """Return p (…) of the t-test of differences (…, n) that rejects for a mean below zero."""
    from scipy.special import stdtr

    n = differences.shape[-1]
    mean, spread = differences.mean(axis=-1), differences.std(axis=-1, ddof=1)
    constant = spread < LOSS_ATOL  # the test statistic would be 0/0 or infinite
    t = mean / np.where(constant, 1.0, spread / np.sqrt(n))
    degenerate = np.where(np.abs(mean) < LOSS_ATOL, 0.5, np.where(mean < 0, 0.0, 1.0))
    return np.where(constant, degenerate, stdtr(n - 1, t))


def p_by_look(differences: Array, looks: Sequence[int]) -> Array:
    """Return p (…, K) of the t-test for a mean below zero at each of the K looks that (…, n) have reached."""
    reached = [n for n in looks if n <= differences.shape[-1]]
    return np.stack([one_sided_p(differences[..., :n]) for n in reached], axis=-1)


def sequential_p(p: Array, looks: Sequence[int]) -> Array:
    """Return the p-value (…, K) after each of K looks, from the one-sided p-values (…, K) at these looks.

    `looks` are all planned numbers of seeds. The largest of several p-values at each look is a valid input
    too: it is never smaller than any of them.
    """
    if len(looks) == 1:
        return p
    smallest = np.minimum.accumulate(p / _weights(looks)[: p.shape[-1]], axis=-1)
    null = _null_distribution(tuple(looks))
    return (np.searchsorted(null, smallest, side="right") + 1) / (len(null) + 1)


def nominal_levels(looks: Sequence[int], level: float) -> Array:
    """Return the one-sided level of the t-test at each look that gives `level` over all looks."""
    if len(looks) == 1:
        return np.asarray([level])
    return np.quantile(_null_distribution(tuple(looks)), level) * _weights(looks)


def _weights(looks: Sequence[int]) -> Array:
    return np.asarray(looks) / max(looks)


@lru_cache(maxsize=8)
def _null_distribution(looks: tuple[int, ...]) -> Array:
    """Return sorted values of S for standard normal differences."""
    rng, weights, samples = np.random.default_rng(_STREAM), _weights(looks), []
    for _ in range(N_PATHS // _BATCH):
        paths = rng.standard_normal((_BATCH // 2, max(looks)))
        for sign in (1, -1):  # antithetic paths
            p = np.stack([one_sided_p(sign * paths[:, :n]) for n in looks], axis=-1)
            samples.append((p / weights).min(axis=-1))
    return np.sort(np.concatenate(samples))
