"""Blocked analysis: all arms and seeds together, with one pooled estimate of the noise.

Seeds are blocks: x_as = μ + arm_a + seed_s + ε_as (a randomized complete block design). The paired t-test of
one arm estimates its noise from n − 1 numbers; here a arms give (a − 1)(n − 1), which narrows the interval at
three to five seeds. The price is the assumption that all arms scatter alike, so Levene's test checks it. If
it fails, noise is pooled only among arms that share an init. The verdict never depends on this analysis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qkflow.studies.stats import holm_correction, perplexity_percent_change

UNEQUAL_VARIANCE_LEVEL = 0.1  # Levene's test has little power with few seeds


@dataclass(frozen=True)
class BlockedDifference:
    """Difference of one arm to the reference with pooled noise."""

    mean: float
    low: float
    high: float
    p: float
    p_holm: float
    df: int
    pooled_arms: int  # arms whose noise is pooled, the reference included
    p_equal_variance: float | None  # Levene's test over all arms

    @property
    def percent(self) -> dict[str, float | None]:
        return {name: perplexity_percent_change(getattr(self, name)) for name in ("mean", "low", "high")}

    def to_dict(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**values, "percent": self.percent}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BlockedDifference:
        return cls(**{name: values[name] for name in cls.__dataclass_fields__})


def blocked_differences(
    losses: Sequence[Sequence[float]], inits: Sequence[str], confidence: float
) -> list[BlockedDifference | None]:
    """Return the differences of arms 1, 2, … to arm 0. `losses` is (arms, seeds), complete.

    None for an arm whose noise cannot be estimated: fewer than two seeds, or no variance at all.
    """
    x = np.asarray(losses, dtype=float)
    if x.ndim != 2 or x.shape[0] < 2 or x.shape[1] < 2:
        return [None] * max(0, len(losses) - 1)
    p_equal = equal_variance_p(x)
    pool_all = p_equal is None or p_equal >= UNEQUAL_VARIANCE_LEVEL
    tests: list[tuple[float, float, float, float, int, int] | None] = []
    for arm in range(1, len(x)):
        same_init = [i for i in range(1, len(x)) if pool_all or inits[i] == inits[arm]]
        tests.append(_difference(x[[0, *same_init]], x[arm] - x[0], confidence))
    corrected = holm_correction([None if each is None else each[3] for each in tests])
    return [
        None if each is None or p is None else BlockedDifference(*each[:4], p, *each[4:], p_equal)
        for each, p in zip(tests, corrected, strict=True)
    ]


def _difference(
    x: np.ndarray, d: np.ndarray, confidence: float
) -> tuple[float, float, float, float, int, int] | None:
    from scipy import stats

    n_arms, n_seeds = x.shape
    df = (n_arms - 1) * (n_seeds - 1)
    variance = float((residuals(x) ** 2).sum() / df)
    if variance == 0:
        return None
    mean, error = float(d.mean()), (2 * variance / n_seeds) ** 0.5
    half = float(stats.t.ppf((1 + confidence) / 2, df)) * error
    p = float(2 * stats.t.sf(abs(mean) / error, df))
    return mean, mean - half, mean + half, p, df, n_arms


def residuals(x: np.ndarray) -> np.ndarray:
    """Return what arms and seeds do not explain of x (arms, seeds)."""
    return x - x.mean(axis=1, keepdims=True) - x.mean(axis=0, keepdims=True) + x.mean()


def equal_variance_p(x: np.ndarray) -> float | None:
    """Return p of the Brown–Forsythe form of Levene's test on the residuals; None where it is undefined."""
    from scipy import stats

    if x.shape[0] < 3 or x.shape[1] < 3:  # residuals of two arms are mirror images
        return None
    with np.errstate(invalid="ignore", divide="ignore"):  # residuals without any variance
        p = float(stats.levene(*residuals(x), center="median").pvalue)
    return p if np.isfinite(p) else None
