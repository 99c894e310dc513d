"""Pace: the learning rate of the query-key circuit relative to all other parameters.

A ratio schedule is a function of the step and has no state. It multiplies the learning rate of the query-key
parameters on top of the base schedule (warmup, decay) of all parameters.

| written | ratio at step s of S |
|---|---|
| `20` | 20 |
| `increasing:40` | 1 + (40 − 1)·s/S, the increasing schedule of Vashisht & Ramaswamy (2026) |
| `increasing:40:steps=1000` | the same over the first 1,000 steps, then 40 |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from qkflow.config_io import unknown_key
from qkflow.errors import InputError
from qkflow.roles import QK_ROLES, parameter_roles
from qkflow.training.optimizer import LRMultiplier

BaseSchedule = Callable[[int], float]  # learning-rate factor of every group at a step
# Steps into which a run with a time budget is divided: its number of optimizer steps is not known in advance.
TIMED_RUN_STEPS = 1_000_000


class RatioSchedule(Protocol):
    def __call__(self, step: int) -> float: ...


@dataclass(frozen=True)
class ConstantRatio:
    ratio: float

    def __post_init__(self) -> None:
        _check_positive(self.ratio)

    def __call__(self, step: int) -> float:
        return self.ratio


@dataclass(frozen=True)
class IncreasingRatio:
    """r(s) = 1 + (F − 1)·s/S up to step S, then F."""

    final_ratio: float
    steps: int

    def __post_init__(self) -> None:
        _check_positive(self.final_ratio)
        if self.steps < 1:
            raise InputError(
                f"an increasing ratio needs at least 1 step, not {self.steps}", code="invalid-ratio"
            )

    def __call__(self, step: int) -> float:
        return 1 + (self.final_ratio - 1) * min(step / self.steps, 1.0)


def parse_ratio_schedule(ratio: str | float | RatioSchedule, steps: int) -> RatioSchedule:
    """Return the schedule written as `ratio` for a run of `steps` steps."""
    if callable(ratio):
        return _check_ramp_fits(ratio, steps)
    kind, _, rest = str(ratio).partition(":")
    try:
        if kind != "increasing":
            return ConstantRatio(float(str(ratio)))
        factor, _, option = rest.partition(":")
        name, _, value = option.partition("=")
        if name not in ("", "steps"):
            raise ValueError
        return _check_ramp_fits(IncreasingRatio(float(factor), int(value) if name else steps), steps)
    except InputError:
        raise
    except ValueError:
        raise InputError(
            f"'{ratio}' is not a ratio: write a number such as 20, or increasing:FACTOR[:steps=N]",
            code="invalid-ratio",
        ) from None


def check_pace(pace: float | str | Mapping[str, Any], *, in_minutes: bool) -> None:
    """Raise InputError for an invalid `train.pace`; `in_minutes`: the budget of the run is a time."""
    schedule = parse_ratio_schedule(_ratio_of(pace), TIMED_RUN_STEPS if in_minutes else 2**62)
    if in_minutes and isinstance(schedule, IncreasingRatio) and schedule.steps != TIMED_RUN_STEPS:
        raise InputError(
            f"train.pace '{_ratio_of(pace)}' counts steps, but train.minutes sets the budget: leave out "
            "steps=N, or set train.steps",
            code="pace-needs-steps",
        )


def pace_lr_multipliers(
    pace: float | str | Mapping[str, Any] | None, model: nn.Module, steps: int | None = None
) -> dict[str, LRMultiplier]:
    """Return the learning-rate multiplier of every query-key role of `model` for `train.pace`.

    `steps` is the number of steps of the run; None: the run has a time budget.
    """
    if pace is None:
        return {}
    total = steps or TIMED_RUN_STEPS
    schedule = parse_ratio_schedule(_ratio_of(pace), total)

    def at_progress(progress: float) -> float:
        return schedule(round(progress * total))

    multiplier = schedule.ratio if isinstance(schedule, ConstantRatio) else at_progress
    present = set(parameter_roles(model).values())
    return {role: multiplier for role in QK_ROLES if role in present}


def get_qk_ratio_scheduler(
    optimizer: Optimizer,
    ratio: str | float | RatioSchedule,
    *,
    steps: int,
    base_schedule: BaseSchedule | None = None,
    last_epoch: int = -1,
) -> LambdaLR:
    """Return a scheduler that multiplies all groups by `base_schedule` and "qk" groups by `ratio` as well.

    Call its `step()` after each optimizer step. Its `state_dict` contains only the step.
    """
    schedule = parse_ratio_schedule(ratio, steps)
    names = [group.get("name") for group in optimizer.param_groups]
    if "qk" not in names:
        raise InputError(
            'the optimizer has no group named "qk": create its groups with hf.param_groups',
            code="no-qk-group",
        )
    common: BaseSchedule = base_schedule if base_schedule is not None else lambda step: 1.0

    def qk_factor(step: int) -> float:
        return common(step) * schedule(step)

    return LambdaLR(optimizer, [qk_factor if name == "qk" else common for name in names], last_epoch)


def _ratio_of(pace: float | str | Mapping[str, Any]) -> float | str:
    """Return the ratio of `train.pace`, which may be written as `{ratio: 4}`."""
    if not isinstance(pace, Mapping):
        return pace
    for key in pace:
        if key != "ratio":
            raise unknown_key("train.pace", str(key), ["ratio"])
    ratio: float | str = pace.get("ratio", 1.0)
    return ratio


def _check_ramp_fits(schedule: RatioSchedule, steps: int) -> RatioSchedule:
    needed = getattr(schedule, "steps", 0)
    if needed > steps:
        raise InputError(
            f"the ratio increases over {needed} steps, but the run has only {steps}",
            code="ratio-ramp-too-long",
        )
    return schedule


def _check_positive(ratio: float) -> None:
    if not ratio > 0 or not math.isfinite(ratio):
        raise InputError(
            f"the ratio of learning rates must be a positive number, not {ratio}", code="invalid-ratio"
        )
