from __future__ import annotations

import numpy as np
import pytest

from qkflow.studies.design import SeedDesign, TestResult, decide, in_the_race
from qkflow.studies.stats import paired_difference

RNG = np.random.default_rng(0)
REFERENCE = RNG.normal(4.0, 0.03, 8)
BETTER = REFERENCE - 0.05 + RNG.normal(0, 0.005, 8)
FIXED = SeedDesign.fixed(margin=0.01)


def test_fixed_design_is_the_paired_t_test() -> None:
    ours, plain = FIXED.difference(BETTER, REFERENCE), paired_difference(BETTER, REFERENCE)
    assert ours.p == pytest.approx(plain.p)
    assert (ours.low, ours.high) == pytest.approx((plain.low, plain.high))
    assert ours.sd == pytest.approx(np.std(BETTER - REFERENCE, ddof=1))


def test_adaptive_interval_and_p_are_wider() -> None:
    fixed, adaptive = (d.difference(BETTER, REFERENCE) for d in (FIXED, SeedDesign.adaptive(20, margin=0.01)))
    assert adaptive.p > fixed.p
    assert adaptive.low < fixed.low < fixed.high < adaptive.high
    assert adaptive.p < 0.05  # and still finds a large effect


def test_adaptive_design_has_no_p_before_its_first_look() -> None:
    difference = SeedDesign.adaptive(20).difference(BETTER[:2], REFERENCE[:2])
    assert difference.p is None
    assert difference.pairs == 2


def test_a_rival_baseline_can_stop_helps_and_a_rival_init_can_stop_hurts() -> None:
    d = BETTER - REFERENCE
    alone = FIXED.difference(BETTER, REFERENCE)
    rival = FIXED.difference(BETTER, REFERENCE, leader=[RNG.normal(0, 0.02, 8)])
    assert alone.p < 0.001 < 0.05 < rival.p
    worse = FIXED.difference(REFERENCE, BETTER)
    as_good = FIXED.difference(REFERENCE, BETTER, cells=[RNG.normal(0, 0.02, 8)])
    assert worse.p < 0.001 < 0.05 < as_good.p
    assert FIXED.difference(BETTER, REFERENCE, leader=[2 * d]).p == pytest.approx(alone.p, rel=0.5)


def test_equivalence_needs_both_bounds() -> None:
    close = REFERENCE + 0.001 + RNG.normal(0, 0.002, 8)
    assert FIXED.difference(close, REFERENCE).p_equivalent < 0.001
    assert FIXED.difference(BETTER, REFERENCE).p_equivalent > 0.5
    assert SeedDesign.fixed().difference(close, REFERENCE).p_equivalent is None
    # a rival init of the variant that is clearly better than the reference
    rival = FIXED.difference(close, REFERENCE, cells=[np.full(8, -0.1) + RNG.normal(0, 0.002, 8)])
    assert rival.p_equivalent > 0.5


def test_decide() -> None:
    tested = TestResult(
        p=np.asarray([0.01, 0.01, 0.2, 0.2, 0.01]),
        direction=np.asarray([-1, 1, 1, -1, -1]),
        p_equivalent=np.asarray([1.0, 1.0, 0.01, 0.2, 0.01]),
    )
    mean = np.asarray([-1.0, 1.0, 0.0, 0.0, -0.001])
    assert decide(tested, mean, FIXED).tolist() == ["helps", "hurts", "equivalent", "undecided", "helps"]


def test_verdict_of_an_earlier_look_must_agree_with_all_seeds() -> None:
    tested = TestResult(np.asarray([0.01, 0.5]), np.asarray([-1, 1]), np.asarray([1.0, 0.01]))
    assert decide(tested, np.asarray([0.02, 0.02]), FIXED).tolist() == ["undecided", "undecided"]


def test_equivalence_holds_at_one_look_not_by_halves() -> None:
    """Above −δ is clear at three seeds, below δ only later: no look shows both."""
    d = np.asarray([0.02, 0.021, 0.019, -0.03, -0.031, -0.029, -0.03, -0.031])
    design = SeedDesign.adaptive(8, margin=0.01)
    result = design.difference(d, np.zeros(8))
    assert result.p_equivalent > 0.3


def test_only_clearly_worse_cells_are_retired() -> None:
    leader = np.asarray([4.0, 4.1, 3.9])
    cells = np.asarray(
        [leader, leader + np.asarray((0.01, -0.01, 0.02)), leader + np.asarray((0.30, 0.31, 0.29))]
    )
    assert in_the_race(leader, cells).tolist() == [True, True, False]
    assert in_the_race(leader[:1], cells[:, :1]).all()  # one seed retires nothing
