"""The largest learning rate that trains."""

from __future__ import annotations

from qkflow.papers.coupled_dynamics.lr_limits import MAX_EXCESS, LrLimit, Trial


def limit(*losses: float | None) -> LrLimit:
    return LrLimit("m", tuple(Trial(10.0**i, loss) for i, loss in enumerate(losses)))


def test_a_rate_trains_within_the_allowed_excess() -> None:
    found = limit(5.0, 4.0, 4.0 + 0.9 * MAX_EXCESS, 4.0 + 1.1 * MAX_EXCESS)
    assert (found.best.lr, found.largest.lr, found.is_censored) == (10, 100, False)


def test_rates_beyond_a_failure_do_not_count() -> None:
    assert limit(4.0, None, 4.1).largest.lr == 1


def test_a_sweep_whose_largest_rate_trains_is_censored() -> None:
    assert limit(4.2, 4.1, 4.0).is_censored
