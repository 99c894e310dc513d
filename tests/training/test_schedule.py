import itertools

import pytest

from qkflow.training.config import TrainConfig
from qkflow.training.schedule import Budget, crosses_milestone, learning_rate


def rates(config, steps=100):
    budget = Budget(steps, None)
    return [learning_rate(config, budget, step, 0.0) for step in range(steps)]


def test_cosine_rises_then_falls_to_its_end():
    found = rates(TrainConfig(lr=1.0, warmup=10, min_lr_factor=0.1))
    assert found[:3] == pytest.approx([0.1, 0.2, 0.3], rel=0.01)
    assert max(found) == pytest.approx(1.0, rel=0.03)
    assert found[-1] == pytest.approx(0.1, rel=0.01)
    assert all(later < earlier for earlier, later in itertools.pairwise(found[10:]))


def test_wsd_stays_and_then_falls_in_a_line():
    found = rates(TrainConfig(lr=1.0, warmup=0, schedule="wsd", decay_ratio=0.2, min_lr_factor=0.0))
    assert found[:81] == [1.0] * 81
    assert found[90] == pytest.approx(0.5)
    assert found[99] == pytest.approx(0.05)


def test_constant_and_warmup_as_a_share():
    found = rates(TrainConfig(lr=2.0, warmup=0.1, schedule="constant"))
    assert found[0] == pytest.approx(0.2)
    assert found[10:] == [2.0] * 90


def test_budgets():
    assert Budget.from_config(TrainConfig(tokens=1000, batch_size=4), length=16).steps == 16  # 15.6
    assert Budget.from_config(TrainConfig(steps=7), length=16).steps == 7
    timed = Budget.from_config(TrainConfig(minutes=2), length=16)
    assert timed.progress(999, 60.0) == 0.5
    assert timed.progress(999, 600.0) == 1.0


@pytest.mark.parametrize("steps", [1, 7, 20, 999])
def test_evaluations_are_spread_evenly_and_end_at_the_end(steps):
    at = [s + 1 for s in range(steps) if crosses_milestone(s / steps, (s + 1) / steps, 20)]
    assert len(at) == min(steps, 20)
    assert at[-1] == steps
