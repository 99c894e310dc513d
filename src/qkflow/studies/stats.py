"""The statistics of paired seeds.

One seed gives every variant the same batches and the same start of every common parameter, so what is judged
is the difference of two losses of one seed: its mean over seeds with a t-interval (exact for normal
differences, however few), a BCa bootstrap beside it (no normality assumed, but with fewer than about eight
seeds there is little to resample), and Holm's correction over all variants judged together.
Differences of loss are turned into per cent of perplexity by 100·(exp(d) − 1).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from qkflow.measures.language import MAX_EXPONENT

MIN_SEEDS_FOR_VERDICT = 3  # two pairs give an interval with one degree of freedom: a verdict needs more
N_RESAMPLES = 9999
LOSS_ATOL = 1e-12  # losses of order one that differ by less than this are the same loss


@dataclass(frozen=True)
class PairedDifference:
    """The mean of paired differences with its intervals; negative = the variant's loss is lower."""

    mean: float
    low: float | None  # t-interval; None where one pair gives no interval
    high: float | None
    bootstrap_low: float | None
    bootstrap_high: float | None
    p: float | None  # two-sided paired t-test of a mean of zero
    pairs: int

    def to_dict(self) -> dict[str, Any]:
        percent = {name: perplexity_percent_change(getattr(self, name)) for name in ("mean", "low", "high")}
        return {**asdict(self), "percent": percent}


def perplexity_percent_change(difference: float | None) -> float | None:
    """100·(exp(d) − 1); None where that is larger than any number, as after a run that went wrong."""
    return None if difference is None or difference > MAX_EXPONENT else 100 * math.expm1(difference)


def paired_difference(
    variant: Sequence[float], reference: Sequence[float], confidence: float = 0.95, seed: int = 0
) -> PairedDifference:
    """Judge losses of a variant against those of the reference, paired by position."""
    if len(variant) != len(reference) or not variant:
        raise ValueError(f"pairs expected, got {len(variant)} and {len(reference)} values")
    d = np.asarray(variant, dtype=float) - np.asarray(reference, dtype=float)
    low, high, p = t_interval(d, confidence)
    bootstrap_low, bootstrap_high = bootstrap_interval(d, confidence, seed)
    return PairedDifference(float(d.mean()), low, high, bootstrap_low, bootstrap_high, p, len(d))


def t_interval(d: np.ndarray, confidence: float) -> tuple[float | None, float | None, float | None]:
    """Student's interval of the mean and the two-sided p-value of a mean of zero."""
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
    """BCa bootstrap interval of the mean; the percentile one where BCa is not defined."""
    from scipy import stats

    if len(d) < 2:
        return None, None
    if _all_equal(d):
        return float(d[0]), float(d[0])
    for method in ("BCa", "percentile"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # scipy warns where BCa is degenerate; we test for it
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


def holm_correction(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down correction (Holm 1979): adjusted p-values, in the order given; None stays None."""
    order = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p))
        adjusted[index] = largest
    return adjusted


def variance_ratio(
    variant: Sequence[float], reference: Sequence[float], confidence: float = 0.95
) -> dict[str, float] | None:
    """Variance over seeds, variant by reference, with the F-interval; None where there is none to compare."""
    from scipy import stats

    if min(len(variant), len(reference)) < 2:
        return None
    above, below = float(np.var(variant, ddof=1)), float(np.var(reference, ddof=1))
    if below == 0:
        return None
    ratio, tail = above / below, (1 - confidence) / 2
    f = stats.f(len(variant) - 1, len(reference) - 1)
    return {"ratio": ratio, "low": ratio / float(f.ppf(1 - tail)), "high": ratio / float(f.ppf(tail))}


def first_crossing(x: Sequence[float], loss: Sequence[float], target: float) -> float | None:
    """Where a loss curve first comes down to `target`, interpolated linearly; None if it never does."""
    for i, value in enumerate(loss):
        if value <= target:
            if i == 0 or value == target:
                return float(x[i])
            share = (loss[i - 1] - target) / (loss[i - 1] - value)
            return float(x[i - 1] + share * (x[i] - x[i - 1]))
    return None


def mean_curve(curves: Sequence[Sequence[tuple[float, ...]]]) -> list[tuple[float, ...]]:
    """Mean over seeds of curves whose rows start with the step; only steps that all curves have."""
    if not curves:
        return []
    by_step = [{row[0]: row for row in curve} for curve in curves]
    common = sorted(set.intersection(*(set(rows) for rows in by_step)))
    return [tuple(float(v) for v in np.mean([rows[step] for rows in by_step], axis=0)) for step in common]
