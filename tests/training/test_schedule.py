from __future__ import annotations

import itertools

import pytest

from qkflow.training.config import TrainConfig
from qkflow.training.schedule import Budget, crosses_milestone, learning_rate, warmup_cosine_factor


def learning_rates(config: TrainConfig, steps: int = 100) -> list[float]:
    budget = Budget(steps, None)
    return [learning_rate(config, budget, step, 0.0) for step in range(steps)]


def test_cosine_warms_up_and_decays_to_the_minimum() -> None:
    rates = learning_rates(TrainConfig(lr=1.0, warmup=10, min_lr_factor=0.1))
    assert rates[:3] == pytest.approx([0.1, 0.2, 0.3], rel=0.01)
    assert max(rates) == pytest.approx(1.0, rel=0.03)
    assert rates[-1] == pytest.approx(0.1, rel=0.01)
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[10:]))


def test_wsd_is_constant_and_then_decays_linearly() -> None:
    config = TrainConfig(lr=1.0, warmup=0, schedule="wsd", decay_ratio=0.2, min_lr_factor=0.0)
    rates = learning_rates(config)
    assert rates[:81] == [1.0] * 81
    assert rates[90] == pytest.approx(0.5)
    assert rates[99] == pytest.approx(0.05)


def test_constant_with_warmup_as_a_fraction() -> None:
    rates = learning_rates(TrainConfig(lr=2.0, warmup=0.1, schedule="constant"))
    assert rates[0] == pytest.approx(0.2)
    assert rates[10:] == [2.0] * 90


def test_warmup_cosine_begins_to_decay_after_the_warmup() -> None:
    factors = [warmup_cosine_factor(step, 110, 10) for step in range(111)]
    assert factors[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert factors[10] == 1.0
    assert factors[60] == pytest.approx(0.5)
    assert factors[110] == pytest.approx(0.0)
    assert warmup_cosine_factor(110, 110, 10, min_factor=0.1) == pytest.approx(0.1)


def test_budgets() -> None:
    assert Budget.from_config(TrainConfig(tokens=1000, batch_size=4), seq_len=16).steps == 16  # 15.6
    assert Budget.from_config(TrainConfig(steps=7), seq_len=16).steps == 7
    timed = Budget.from_config(TrainConfig(minutes=2), seq_len=16)
    assert timed.progress(999, 60.0) == 0.5
    assert timed.progress(999, 600.0) == 1.0


@pytest.mark.parametrize("steps", [1, 7, 20, 999])
def test_milestones_are_evenly_spaced_and_include_the_end(steps: int) -> None:
    at = [s + 1 for s in range(steps) if crosses_milestone(s / steps, (s + 1) / steps, 20)]
    assert len(at) == min(steps, 20)
    assert at[-1] == steps
