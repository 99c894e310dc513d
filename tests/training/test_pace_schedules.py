from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from qkflow import hf
from qkflow.errors import InputError
from qkflow.training.pace import ConstantRatio, IncreasingRatio, get_qk_ratio_scheduler, parse_ratio_schedule


def optimizer(ratio: float = 1.0) -> torch.optim.Optimizer:
    model = nn.ModuleDict({"q": nn.Linear(2, 2), "v": nn.Linear(2, 2)})
    groups = hf.param_groups(model, 0.1, ratio=ratio, roles={"q.*": "q", "v.*": "v"})
    return torch.optim.SGD(groups)


def learning_rates(found: torch.optim.Optimizer) -> dict[str, float]:
    return {group["name"]: group["lr"] for group in found.param_groups}


@given(factor=st.floats(0.1, 100), steps=st.integers(1, 1000), step=st.integers(0, 2000))
def test_the_increasing_schedule_is_its_formula(factor: float, steps: int, step: int) -> None:
    expected = 1 + (factor - 1) * step / steps if step <= steps else factor
    assert IncreasingRatio(factor, steps)(step) == pytest.approx(expected)


def test_schedules_are_read() -> None:
    assert parse_ratio_schedule(20, 10) == ConstantRatio(20.0)
    assert parse_ratio_schedule("0.5", 10) == ConstantRatio(0.5)
    assert parse_ratio_schedule("increasing:40", 10) == IncreasingRatio(40.0, 10)
    assert parse_ratio_schedule("increasing:40:steps=5", 10) == IncreasingRatio(40.0, 5)

    def own(step: int) -> float:
        return 2.0 + step

    assert parse_ratio_schedule(own, 10) is own


def cosine(step: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * step / 8))


@pytest.mark.parametrize("ratio", [3.0, "increasing:5", lambda step: 1.0 + step % 3])
def test_a_ratio_composes_with_the_base_schedule(ratio: Any) -> None:
    found = optimizer(ratio=2.0)
    scheduler = get_qk_ratio_scheduler(found, ratio, steps=8, base_schedule=cosine)
    schedule = parse_ratio_schedule(ratio, 8)
    for step in range(8):
        rates = learning_rates(found)
        assert rates["rest"] == pytest.approx(0.1 * cosine(step))
        assert rates["qk"] == pytest.approx(0.1 * 2.0 * cosine(step) * schedule(step))
        found.step()
        scheduler.step()


def test_a_schedule_goes_on_where_it_was() -> None:
    whole, stopped, resumed = optimizer(), optimizer(), optimizer()
    schedulers = {
        id(o): get_qk_ratio_scheduler(o, "increasing:7", steps=6, base_schedule=cosine)
        for o in (whole, stopped, resumed)
    }
    for _ in range(5):
        whole.step()
        schedulers[id(whole)].step()
    for _ in range(3):
        stopped.step()
        schedulers[id(stopped)].step()
    kept = io.BytesIO()
    state = {"scheduler": schedulers[id(stopped)].state_dict(), "optimizer": stopped.state_dict()}
    torch.save(state, kept)
    kept.seek(0)
    loaded = torch.load(kept, weights_only=True)  # plain data: nothing has to be unpickled
    schedulers[id(resumed)].load_state_dict(loaded["scheduler"])
    resumed.load_state_dict(loaded["optimizer"])
    for _ in range(2):
        resumed.step()
        schedulers[id(resumed)].step()
    assert learning_rates(resumed) == pytest.approx(learning_rates(whole))


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("fast", "'fast' is not a ratio"),
        ("increasing", "'increasing' is not a ratio"),
        ("increasing:4:rounds=2", "is not a ratio"),
        (0, "must be a positive number, not 0"),
        (-2.0, "must be a positive number"),
        ("increasing:-3", "must be a positive number"),
        ("increasing:3:steps=0", "at least 1 step"),
        ("increasing:3:steps=11", "increases over 11 steps, but the run has 10"),
        (IncreasingRatio(3.0, 11), "increases over 11 steps, but the run has 10"),
    ],
)
def test_bad_ratios_are_refused(written: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_ratio_schedule(written, 10)


def test_groups_must_be_ours() -> None:
    with pytest.raises(InputError, match='no group named "qk"'):
        get_qk_ratio_scheduler(torch.optim.SGD(nn.Linear(2, 2).parameters()), 2, steps=3)
