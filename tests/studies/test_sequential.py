"""Group-sequential t-tests against scipy, and their error rate by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from qkflow.studies.sequential import nominal_levels, one_sided_p, p_by_look, planned_looks, sequential_p

LOOKS = planned_looks(10)


def adaptive_p(d: np.ndarray, looks: tuple[int, ...] = LOOKS) -> np.ndarray:
    return sequential_p(p_by_look(d, looks), looks)


def test_planned_looks() -> None:
    assert planned_looks(20) == (3, 4, 5, 6, 8, 10, 12, 14, 16, 18, 20)
    assert planned_looks(7) == (3, 4, 5, 6, 7)
    assert planned_looks(3) == (3,)


def test_one_sided_p_matches_scipy() -> None:
    d = np.random.default_rng(0).normal(-0.3, 1.0, (5, 6))
    expected = stats.ttest_1samp(d, 0.0, axis=-1, alternative="less").pvalue
    assert one_sided_p(d) == pytest.approx(expected)
    assert adaptive_p(d, (6,))[..., 0] == pytest.approx(expected)  # one look: the t-test


@pytest.mark.parametrize(("values", "p"), [([0.0] * 3, 0.5), ([-0.2] * 3, 0.0), ([0.2] * 3, 1.0)])
def test_constant_differences(values: list[float], p: float) -> None:
    assert one_sided_p(np.asarray(values)) == p


def test_p_never_increases_and_ignores_later_seeds() -> None:
    d = np.random.default_rng(1).normal(-0.5, 1.0, (50, 10))
    p = adaptive_p(d)
    assert p.shape == (50, len(LOOKS))
    assert (np.diff(p, axis=-1) <= 0).all()
    assert (p[:, :3] == adaptive_p(d[:, :5])).all()


def test_stopping_at_the_first_rejection_keeps_the_level() -> None:
    d = np.random.default_rng(2).normal(0.0, 3.0, (20_000, 10))  # the variance does not matter
    smallest = adaptive_p(d)[:, -1]
    for level in (0.01, 0.025, 0.1):
        error = 3 * math.sqrt(level * (1 - level) / len(d))
        assert abs((smallest <= level).mean() - level) < error
    naive = np.min([one_sided_p(d[:, :n]) for n in LOOKS], axis=0)
    assert (naive <= 0.025).mean() > 0.06  # what repeated t-tests would do


def test_nominal_levels_are_the_boundary() -> None:
    levels = nominal_levels(LOOKS, 0.025)
    assert (np.diff(levels) > 0).all()
    assert levels[-1] < 0.025
    d = np.random.default_rng(3).normal(-0.4, 1.0, (2000, 10))
    crossed = np.any([one_sided_p(d[:, :n]) <= c for n, c in zip(LOOKS, levels, strict=True)], axis=0)
    assert (crossed == (adaptive_p(d)[:, -1] <= 0.025)).mean() > 0.999
