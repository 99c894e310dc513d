from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from input_errors import raises_code
from qkflow import hf
from qkflow.models import Decoder, preset
from qkflow.roles import parameter_roles
from qkflow.training.optimizer import parameter_groups
from qkflow.training.pace import (
    ConstantRatio,
    IncreasingRatio,
    get_qk_ratio_scheduler,
    pace_lr_multipliers,
    parse_ratio_schedule,
)


def optimizer(ratio: float = 1.0) -> torch.optim.Optimizer:
    model = nn.ModuleDict({"q": nn.Linear(2, 2), "v": nn.Linear(2, 2)})
    groups = hf.param_groups(model, 0.1, ratio=ratio, roles={"q.*": "q", "v.*": "v"})
    return torch.optim.SGD(groups)


def learning_rates(found: torch.optim.Optimizer) -> dict[str, float]:
    return {group["name"]: group["lr"] for group in found.param_groups}


@given(factor=st.floats(0.1, 100), steps=st.integers(1, 1000), step=st.integers(0, 2000))
def test_increasing_ratio_formula(factor: float, steps: int, step: int) -> None:
    expected = 1 + (factor - 1) * step / steps if step <= steps else factor
    assert IncreasingRatio(factor, steps)(step) == pytest.approx(expected)


def test_parse_ratio_schedule() -> None:
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
def test_ratio_multiplies_the_base_schedule(ratio: Any) -> None:
    found = optimizer(ratio=2.0)
    scheduler = get_qk_ratio_scheduler(found, ratio, steps=8, base_schedule=cosine)
    schedule = parse_ratio_schedule(ratio, 8)
    for step in range(8):
        rates = learning_rates(found)
        assert rates["rest"] == pytest.approx(0.1 * cosine(step))
        assert rates["qk"] == pytest.approx(0.1 * 2.0 * cosine(step) * schedule(step))
        found.step()
        scheduler.step()


def test_scheduler_state_resumes() -> None:
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
    loaded = torch.load(kept, weights_only=True)
    schedulers[id(resumed)].load_state_dict(loaded["scheduler"])
    resumed.load_state_dict(loaded["optimizer"])
    for _ in range(2):
        resumed.step()
        schedulers[id(resumed)].step()
    assert learning_rates(resumed) == pytest.approx(learning_rates(whole))


@pytest.mark.parametrize(
    ("ratio", "code"),
    [
        ("fast", "invalid-ratio"),
        ("20:steps=3", "invalid-ratio"),
        ("increasing", "invalid-ratio"),
        ("increasing:4:rounds=2", "invalid-ratio"),
        (0, "invalid-ratio"),
        (-2.0, "invalid-ratio"),
        (float("nan"), "invalid-ratio"),
        ("increasing:-3", "invalid-ratio"),
        ("increasing:3:steps=0", "invalid-ratio"),
        ("early:x", "invalid-ratio"),
        ("early:0", "invalid-ratio"),
        ("early:2:steps=0", "invalid-ratio"),
        ("early:2:steps=11", "ratio-ramp-too-long"),
        ("increasing:3:steps=11", "ratio-ramp-too-long"),
        (IncreasingRatio(3.0, 11), "ratio-ramp-too-long"),
    ],
)
def test_bad_ratios_are_refused(ratio: Any, code: str) -> None:
    with raises_code(code):
        parse_ratio_schedule(ratio, 10)


def small_model(**options: Any) -> Decoder:
    return Decoder(preset("tiny", vocab_size=32, n_layers=1, dim=16, n_heads=2, **options), seed=0)


def test_pace_multiplies_the_lr_of_the_qk_roles() -> None:
    model = small_model()
    assert pace_lr_multipliers(None, model) == {}
    for pace in (4, "4", {"ratio": 4}):
        assert pace_lr_multipliers(pace, model) == {"q": 4.0, "k": 4.0}
    collapsed = small_model(attention={"circuit": "CAFO", "rope": False})
    assert pace_lr_multipliers(2.0, collapsed) == {"qk": 2.0}
    with raises_code("invalid-ratio"):
        pace_lr_multipliers(-1, model)
    with raises_code("unknown-key"):
        pace_lr_multipliers({"rate": 1}, model)


@pytest.mark.parametrize(
    ("pace", "steps", "ratios"),
    [
        ("increasing:5", 8, [1.0, 3.0, 5.0]),
        ({"ratio": "increasing:5:steps=4"}, 8, [1.0, 5.0, 5.0]),
        ("increasing:5", None, [1.0, 3.0, 5.0]),  # a time budget
        ("early:0.25", 10, [0.25, 1.0, 1.0]),
        ("early:0.25", None, [0.25, 1.0, 1.0]),
        ("early:4:steps=6", 8, [4.0, 4.0, 1.0]),
    ],
)
def test_pace_schedules_are_functions_of_progress(pace: Any, steps: int | None, ratios: list[float]) -> None:
    multiplier = pace_lr_multipliers(pace, small_model(), steps)["q"]
    assert callable(multiplier)
    assert [multiplier(progress) for progress in (0.0, 0.5, 1.0)] == pytest.approx(ratios)


@pytest.mark.parametrize(
    ("layers", "faster"), [("upper", (2, 3, 4)), ("lower", (0, 1)), ([0, 3], (0, 3)), (None, range(5))]
)
def test_pace_of_some_layers(layers: Any, faster: Sequence[int]) -> None:
    model = Decoder(preset("tiny", vocab_size=32, n_layers=5, dim=16, n_heads=2), seed=0)
    multipliers = pace_lr_multipliers({"ratio": 4, "layers": layers}, model)
    groups = parameter_groups(model, 0.5, lr_multipliers=multipliers)
    lrs = {name: group.lr for group in groups for name in group.parameters}
    assert set(lrs) == {name for name, _ in model.named_parameters()}
    roles = parameter_roles(model)
    for name, lr in lrs.items():
        is_faster = roles[name] in ("q", "k") and int(name.split(".")[1]) in faster
        assert lr == (2.0 if is_faster else 0.5), name


@pytest.mark.parametrize("layers", ["top", [], [0.5], [1], [-1], 0, [True]])
def test_bad_pace_layers_are_refused(layers: Any) -> None:
    with raises_code("invalid-pace-layers"):
        pace_lr_multipliers({"ratio": 4, "layers": layers}, small_model())


def test_scheduler_needs_a_qk_group() -> None:
    with raises_code("no-qk-group"):
        get_qk_ratio_scheduler(torch.optim.SGD(nn.Linear(2, 2).parameters()), 2, steps=3)
