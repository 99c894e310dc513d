"""Statistics against scipy, worked examples, and simulated data."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from qkflow.studies.stats import (
    bootstrap_interval,
    first_crossing,
    holm_correction,
    mean_curve,
    paired_difference,
    perplexity_percent_change,
    t_interval,
    variance_ratio,
)


def test_paired_difference_matches_scipy() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(3.0, 0.1, 7), rng.normal(3.05, 0.1, 7)
    ours, theirs = paired_difference(a.tolist(), b.tolist(), 0.9), stats.ttest_rel(a, b)
    interval = theirs.confidence_interval(0.9)
    assert ours.p == pytest.approx(theirs.pvalue)
    assert (ours.low, ours.high) == pytest.approx((interval.low, interval.high))
    assert ours.mean == pytest.approx(np.mean(a - b))


def test_pairing_removes_variance_shared_by_seeds() -> None:
    shared = np.array([0.0, 1.0, -1.0, 2.0])
    difference = paired_difference(list(shared - 0.1 + [0, 0.001, 0, -0.001]), list(shared))
    assert difference.high is not None
    assert difference.high < -0.09


def test_t_interval_coverage() -> None:
    rng = np.random.default_rng(1)
    trials, covered = 1000, 0
    for _ in range(trials):
        low, high, _ = t_interval(rng.normal(0.3, 1.0, 3), 0.95)
        covered += low <= 0.3 <= high  # type: ignore[operator]
    # 95% ± 3 standard errors of a binomial share
    assert abs(covered / trials - 0.95) < 3 * math.sqrt(0.95 * 0.05 / trials)


def test_bootstrap_interval_coverage_of_skewed_data() -> None:
    rng = np.random.default_rng(2)
    trials, covered = 200, 0
    for i in range(trials):
        low, high = bootstrap_interval(rng.exponential(size=30), 0.9, seed=i, n_resamples=500)
        covered += low <= 1.0 <= high  # type: ignore[operator]
    assert 0.80 < covered / trials < 0.96


def test_bootstrap_is_deterministic_by_seed() -> None:
    d = np.random.default_rng(3).normal(size=6)
    assert bootstrap_interval(d, 0.95, 0) == bootstrap_interval(d, 0.95, 0)
    assert bootstrap_interval(d, 0.95, 0) != bootstrap_interval(d, 0.95, 1)


@pytest.mark.parametrize("values", [[0.0, 0.0, 0.0], [0.2, 0.2, 0.2], [0.1], [0.1, 0.3]])
def test_degenerate_differences_are_never_nan(values: list[float]) -> None:
    difference = paired_difference(values, [0.0] * len(values))
    numbers = [
        v for v in (difference.low, difference.high, difference.bootstrap_low, difference.p) if v is not None
    ]
    assert all(math.isfinite(number) for number in numbers)
    assert (difference.p is None) == (len(values) == 1)
    if values == [0.0, 0.0, 0.0]:
        assert difference.p == 1.0


def test_unpaired_or_empty_losses_are_rejected() -> None:
    with pytest.raises(ValueError, match="expected pairs"):
        paired_difference([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="expected pairs"):
        paired_difference([], [])


def test_holm_worked_example() -> None:
    assert holm_correction([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm_correction([0.02, None, 0.5]) == [pytest.approx(0.04), None, pytest.approx(0.5)]
    assert holm_correction([]) == []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_is_monotone_and_below_bonferroni(p: list[float]) -> None:
    adjusted = [value for value in holm_correction(p) if value is not None]
    order = np.argsort(p, kind="stable")
    assert [adjusted[i] for i in order] == sorted(adjusted)
    assert all(raw <= value <= 1 for raw, value in zip(p, adjusted, strict=True))
    assert adjusted[order[0]] == min(1.0, len(p) * min(p))  # Bonferroni for the smallest
    assert max(adjusted) <= min(1.0, len(p) * max(p))


def test_holm_family_wise_error() -> None:
    rng = np.random.default_rng(4)
    rejections = sum(min(holm_correction(list(rng.uniform(size=6)))) < 0.05 for _ in range(2000))  # type: ignore[type-var]
    assert rejections / 2000 < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)


def test_variance_ratio_interval_matches_the_f_test() -> None:
    rng = np.random.default_rng(5)
    a, b = rng.normal(0, 2, 9), rng.normal(0, 1, 6)
    found = variance_ratio(list(a), list(b))
    assert found is not None
    assert found.ratio == pytest.approx(a.var(ddof=1) / b.var(ddof=1))
    # the interval excludes 1 exactly when the two-sided F-test rejects
    p = 2 * min(stats.f.sf(found.ratio, 8, 5), stats.f.cdf(found.ratio, 8, 5))
    assert (found.low <= 1 <= found.high) == (p >= 0.05)
    assert variance_ratio([1.0], [1.0, 2.0]) is None
    assert variance_ratio([1.0, 2.0], [1.0, 1.0]) is None


def test_first_crossing() -> None:
    x, loss = [0.0, 100.0, 200.0, 300.0], [5.0, 4.0, 4.2, 3.0]
    assert first_crossing(x, loss, 4.5) == pytest.approx(50)
    assert first_crossing(x, loss, 4.0) == pytest.approx(100)
    assert first_crossing(x, loss, 3.6) == pytest.approx(250)  # between 4.2 and 3.0: after the bump
    assert first_crossing(x, loss, 6.0) == 0.0
    assert first_crossing(x, loss, 2.9) is None
    assert first_crossing([], [], 1.0) is None


def test_mean_curve_keeps_common_steps() -> None:
    a = [(0.0, 0.0, 5.0), (10.0, 100.0, 3.0), (20.0, 200.0, 2.0)]
    b = [(0.0, 0.0, 7.0), (10.0, 100.0, 4.0)]
    assert mean_curve([a, b]) == [(0.0, 0.0, 6.0), (10.0, 100.0, 3.5)]
    assert mean_curve([]) == []


def test_perplexity_percent_change() -> None:
    assert perplexity_percent_change(math.log(0.9)) == pytest.approx(-10)
    assert perplexity_percent_change(None) is None
    assert perplexity_percent_change(-1e9) == -100
    assert perplexity_percent_change(1e9) is None
