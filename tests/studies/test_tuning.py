from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from qkflow.studies.tuning import MAX_WIDENINGS, tune_lr

Loss = Callable[[float], float | None]


def tune(losses: dict[str, Loss], factors: Sequence[float]) -> tuple[dict[str, float], list[float]]:
    """Tune cells whose loss is a function of the factor; return the best factors and all that were tried."""
    tried: list[float] = []

    def run_trials(new: Sequence[float]) -> dict[str, dict[float, float | None]]:
        assert not set(new) & set(tried)
        tried.extend(new)
        return {cell: {factor: loss(factor) for factor in new} for cell, loss in losses.items()}

    return tune_lr(run_trials, factors), sorted(tried)


def parabola(optimum: float) -> Loss:
    return lambda factor: (factor - optimum) ** 2


def test_interior_optimum_needs_no_wider_grid() -> None:
    assert tune({"a": parabola(1)}, (0.5, 1, 2)) == ({"a": 1}, [0.5, 1, 2])


def test_grid_is_widened_for_all_cells_until_every_optimum_is_interior() -> None:
    best, tried = tune({"a": parabola(1), "high": parabola(8), "low": parabola(0.25)}, (0.5, 1, 2))
    assert best == {"a": 1, "high": 8, "low": 0.25}
    assert tried == [0.125, 0.25, 0.5, 1, 2, 4, 8, 16]


def test_diverged_rate_counts_as_worse() -> None:
    best, tried = tune({"a": lambda f: None if f > 2 else -f}, (0.5, 1, 2))
    assert best == {"a": 2}
    assert tried == [0.5, 1, 2, 4]


def test_cell_that_diverges_everywhere_gets_smaller_rates() -> None:
    best, tried = tune({"a": lambda f: None if f > 0.2 else abs(f - 0.125)}, (0.5, 1, 2))
    assert best == {"a": 0.125}
    assert tried == pytest.approx([0.0625, 0.125, 0.25, 0.5, 1, 2])
    assert tune({"a": lambda f: None}, (1,))[0] == {}


def test_widening_is_limited() -> None:
    best, tried = tune({"a": lambda f: -f}, (1, 2))
    assert best == {"a": 2 * 2**MAX_WIDENINGS}
    assert len(tried) == 2 + MAX_WIDENINGS


def test_one_factor_is_extended_on_both_sides() -> None:
    assert tune({"a": parabola(1)}, (1,)) == ({"a": 1}, [0.5, 1, 2])
