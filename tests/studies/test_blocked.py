from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from qkflow.studies.blocked import BlockedDifference, blocked_differences, equal_variance_p

RNG = np.random.default_rng(0)
SEEDS = RNG.normal(0, 0.1, 5)
EQUAL = np.stack([4.0 + mean + SEEDS + RNG.normal(0, 0.01, 5) for mean in (0.0, -0.03, 0.0, 0.02)])
UNEQUAL = np.stack([EQUAL[0], EQUAL[1], 4.0 + SEEDS + RNG.normal(0, 0.5, 5), EQUAL[3]])
INITS = ("gpt2", "gpt2", "fan_in", "gpt2")


def test_two_arms_give_the_paired_t_test() -> None:
    (found,) = blocked_differences(EQUAL[:2], INITS[:2], 0.95)
    assert found is not None
    theirs = stats.ttest_rel(EQUAL[1], EQUAL[0])
    assert found.p == pytest.approx(theirs.pvalue)
    interval = theirs.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.df == 4


def test_noise_is_pooled_over_all_arms() -> None:
    found = blocked_differences(EQUAL, INITS, 0.95)
    assert [each.df for each in found if each] == [12, 12, 12]
    assert found[0] is not None
    residual = EQUAL - EQUAL.mean(1, keepdims=True) - EQUAL.mean(0) + EQUAL.mean()
    error = np.sqrt(2 * (residual**2).sum() / 12 / 5)
    half = stats.t.ppf(0.975, 12) * error
    assert (found[0].low, found[0].high) == pytest.approx((found[0].mean - half, found[0].mean + half))
    assert found[0].p_holm >= found[0].p
    assert BlockedDifference.from_dict(found[0].to_dict()) == found[0]


def test_unequal_variances_are_pooled_by_init() -> None:
    p = equal_variance_p(UNEQUAL)
    assert p is not None
    assert p < 0.1
    found = blocked_differences(UNEQUAL, INITS, 0.95)
    assert [each.pooled_arms for each in found if each] == [3, 2, 3]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].high - found[0].low < 0.2 * (found[1].high - found[1].low)


def test_too_little_data() -> None:
    assert blocked_differences(EQUAL[:, :1], INITS, 0.95) == [None] * 3
    assert blocked_differences(np.ones((2, 3)), INITS[:2], 0.95) == [None]
    assert blocked_differences(EQUAL[:1], INITS[:1], 0.95) == []
