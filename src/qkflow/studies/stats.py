"""Statistics of paired seeds.

With one seed, every variant gets the same batches and the same init of every shared parameter. The tested
quantity is therefore the difference of two losses of one seed: its mean over seeds with a t-interval (exact
for normal differences, however few), a BCa bootstrap interval beside it (no normality assumed, but little to
resample below about eight seeds), and Holm's correction over all variants tested together. `sequential` has
the p-values of studies that add seeds until they are decided.
A difference d of losses is a change of perplexity of 100·(exp(d) − 1) percent.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import numpy as np

from qkflow.measures.language import MAX_EXPONENT

MIN_SEEDS_FOR_VERDICT = 3  # two pairs leave one degree of freedom
N_RESAMPLES = 9999
LOSS_ATOL = 1e-12  # losses of order one that differ by less are equal


@dataclass(frozen=True)
class PairedDifference:
    """Mean of paired differences with its intervals; negative if the variant's loss is lower."""

    mean: float
    low: float | None  # t-interval; None for one pair
    high: float | None
    bootstrap_low: float | None
    bootstrap_high: float | None
    p: float | None  # two-sided paired t-test of a mean of zero
    pairs: int
    sd: float | None = None  # of the differences
    direction: int = 0  # of the evidence behind p: −1 for a lower loss, 1 for a higher one, 0 not known
    p_equivalent: float | None = None  # two one-sided tests that the mean is within the margin

    @property
    def percent(self) -> dict[str, float | None]:
        """`mean`, `low` and `high` in percent of perplexity; None where exp overflows."""
        return {name: perplexity_percent_change(getattr(self, name)) for name in ("mean", "low", "high")}

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "percent": self.percent}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(**{item.name: values[item.name] for item in fields(cls)})


@dataclass(frozen=True)
class VarianceRatio:
    """Variance over seeds, variant divided by reference, with its F-interval."""

    ratio: float
    low: float
    high: float


def perplexity_percent_change(difference: float | None) -> float | None:
    """Return 100·(exp(d) − 1), or None where exp overflows, as after a diverged run."""
    return None if difference is None or difference > MAX_EXPONENT else 100 * math.expm1(difference)


def paired_difference(
    variant: Sequence[float], reference: Sequence[float], confidence: float = 0.95, seed: int = 0
) -> PairedDifference:
    """Compare the losses of a variant with those of the reference, paired by position."""
    if len(variant) != len(reference) or not len(variant):
        raise ValueError(f"expected pairs, got {len(variant)} and {len(reference)} values")
    d = np.asarray(variant, dtype=float) - np.asarray(reference, dtype=float)
    low, high, p = t_interval(d, confidence)
    bootstrap_low, bootstrap_high = bootstrap_interval(d, confidence, seed)
    sd = float(d.std(ddof=1)) if len(d) > 1 else None
    direction = 0 if p is None else -1 if d.mean() < 0 else 1
    interval = (low, high, bootstrap_low, bootstrap_high)
    return PairedDifference(float(d.mean()), *interval, p, len(d), sd, direction)


def t_interval(d: np.ndarray, confidence: float) -> tuple[float | None, float | None, float | None]:
    """Return Student's interval of the mean (low, high) and the two-sided p-value of a mean of zero."""
    from scipy import stats

    if len(d) < 2:
        return None, None, None
    if _all_equal(d):  # the test statistic would be 0/0 or infinite
        return float(d[0]), float(d[0]), 1.0 if abs(d[0]) < LOSS_ATOL else 0.0
    test = stats.ttest_1samp(d, 0.0)
    interval = test.confidence_interval(confidence)
    return float(interval.low), float(interval.high), float(test.pvalue)


def _all_equal(d: np.ndarray) -> bool:
    return bool(np.ptp(d) < LOSS_ATOL)


def bootstrap_interval(
    d: np.ndarray, confidence: float, seed: int, n_resamples: int = N_RESAMPLES
) -> tuple[float | None, float | None]:
    """Return the BCa bootstrap interval of the mean; the percentile interval where BCa is undefined."""
    from scipy import stats

    if len(d) < 2:
        return None, None
    if _all_equal(d):
        return float(d[0]), float(d[0])
    for method in ("BCa", "percentile"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # scipy warns where BCa is degenerate; that is tested below
            interval = stats.bootstrap(
                (d,),
                np.mean,
                n_resamples=n_resamples,
                confidence_level=confidence,
                method=method,
                rng=np.random.default_rng(seed),
            ).confidence_interval
        if np.isfinite([interval.low, interval.high]).all():
            return float(interval.low), float(interval.high)
    return None, None


def holm(p: np.ndarray) -> np.ndarray:
    """Return p-values (…, m) of m tests adjusted by Holm's step-down method (Holm 1979)."""
    order = np.argsort(p, axis=-1, kind="stable")
    factors = p.shape[-1] - np.arange(p.shape[-1])
    stepped = np.minimum(1.0, np.take_along_axis(p, order, axis=-1) * factors)
    adjusted = np.empty_like(stepped)
    np.put_along_axis(adjusted, order, np.maximum.accumulate(stepped, axis=-1), axis=-1)
    return adjusted


def holm_correction(p_values: Sequence[float | None], planned: int = 0) -> list[float | None]:
    """Return p-values adjusted by Holm's method, in the same order; None stays None and is not counted.

    With `planned` tests in all, those that have no p-value yet count as if theirs were 1.
    """
    tested = [i for i, p in enumerate(p_values) if p is not None]
    adjusted: list[float | None] = [None] * len(p_values)
    missing = [1.0] * max(0, planned - len(tested))
    values = holm(np.asarray([*(p_values[i] for i in tested), *missing], dtype=float))
    for index, value in zip(tested, values[: len(tested)], strict=True):
        adjusted[index] = float(value)
    return adjusted


def variance_ratio(
    variant: Sequence[float], reference: Sequence[float], confidence: float = 0.95
) -> VarianceRatio | None:
    """Return the ratio of variances over seeds; None with fewer than two seeds or a variance of zero."""
    from scipy import stats

    if min(len(variant), len(reference)) < 2:
        return None
    above, below = float(np.var(variant, ddof=1)), float(np.var(reference, ddof=1))
    if below == 0:
        return None
    ratio, tail = above / below, (1 - confidence) / 2
    f = stats.f(len(variant) - 1, len(reference) - 1)
    return VarianceRatio(ratio, ratio / float(f.ppf(1 - tail)), ratio / float(f.ppf(tail)))


def first_crossing(x: Sequence[float], loss: Sequence[float], target: float) -> float | None:
    """Return the x at which a loss curve first reaches `target`, by linear interpolation; None if never."""
    for i, value in enumerate(loss):
        if value <= target:
            if i == 0 or value == target:
                return float(x[i])
            share = (loss[i - 1] - target) / (loss[i - 1] - value)
            return float(x[i - 1] + share * (x[i] - x[i - 1]))
    return None


def mean_curve(curves: Sequence[Sequence[tuple[float, ...]]]) -> list[tuple[float, ...]]:
    """Average curves over seeds. Rows start with the step; only steps that all curves have are kept."""
    if not curves:
        return []
    by_step = [{row[0]: row for row in curve} for curve in curves]
    common = sorted(set.intersection(*(set(rows) for rows in by_step)))
    return [tuple(float(v) for v in np.mean([rows[step] for rows in by_step], axis=0)) for step in common]
