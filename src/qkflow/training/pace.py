"""How the ratio of the two circuits' learning rates moves during training.

A ratio schedule is a function of the step, and so needs no state: a resumed run goes on where it was. It
multiplies the learning rate of the groups that `param_groups` calls "qk", on top of whatever the base
schedule (warm-up, decay) does to all groups.

| written | factor at step s of S |
|---|---|
| `20` | 20 |
| `increasing:40` | 1 + (40 − 1)·s/S, the increasing schedule of Vashisht & Ramaswamy (2026) |
| `increasing:40:steps=1000` | the same over the first 1,000 steps, then 40 |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from qkflow.errors import InputError

BaseSchedule = Callable[[int], float]  # a base schedule: the factor of every group at a step


class RatioSchedule(Protocol):
    def __call__(self, step: int) -> float: ...


@dataclass(frozen=True)
class ConstantRatio:
    ratio: float

    def __post_init__(self) -> None:
        _check_positive("ratio", self.ratio)

    def __call__(self, step: int) -> float:
        return self.ratio


@dataclass(frozen=True)
class IncreasingRatio:
    """η(s) = η₀·[1 + (F − 1)·s/S], and F·η₀ from step S on."""

    final_ratio: float
    steps: int

    def __post_init__(self) -> None:
        _check_positive("factor", self.final_ratio)
        if self.steps < 1:
            raise InputError(f"an increasing ratio needs at least 1 step, not {self.steps}")

    def __call__(self, step: int) -> float:
        return 1 + (self.final_ratio - 1) * min(step / self.steps, 1.0)


def parse_ratio_schedule(ratio: str | float | RatioSchedule, steps: int) -> RatioSchedule:
    """Read a schedule for a run of `steps` steps."""
    if callable(ratio):
        return _check_ramp_fits(ratio, steps)
    kind, _, rest = str(ratio).partition(":")
    try:
        if kind != "increasing":
            return ConstantRatio(float(kind))
        factor, _, option = rest.partition(":")
        name, _, value = option.partition("=")
        if name not in ("", "steps"):
            raise ValueError
        return _check_ramp_fits(IncreasingRatio(float(factor), int(value) if name else steps), steps)
    except InputError:
        raise
    except ValueError:
        raise InputError(
            f"'{ratio}' is not a ratio: write a number such as 20, or increasing:FACTOR[:steps=N]"
        ) from None


def get_qk_ratio_scheduler(
    optimizer: Optimizer,
    ratio: str | float | RatioSchedule,
    *,
    steps: int,
    base_schedule: BaseSchedule | None = None,
    last_epoch: int = -1,
) -> LambdaLR:
    """A scheduler that multiplies every group by `base` and the "qk" groups by `ratio` as well.

    Call its `step()` after each optimizer step. Its `state_dict` holds the step alone.
    """
    schedule = parse_ratio_schedule(ratio, steps)
    names = [group.get("name") for group in optimizer.param_groups]
    if "qk" not in names:
        raise InputError('the optimizer has no group named "qk": make its groups with hf.param_groups')
    common: BaseSchedule = base_schedule if base_schedule is not None else lambda step: 1.0

    def paced_factor(step: int) -> float:
        return common(step) * schedule(step)

    return LambdaLR(optimizer, [paced_factor if name == "qk" else common for name in names], last_epoch)


def _check_ramp_fits(schedule: RatioSchedule, steps: int) -> RatioSchedule:
    needed = getattr(schedule, "steps", 0)
    if needed > steps:
        raise InputError(
            f"the ratio increases over {needed} steps, but the run has {steps}: it would never get there"
        )
    return schedule


def _check_positive(name: str, value: float) -> None:
    if not value > 0 or not math.isfinite(value):
        raise InputError(f"the {name} of learning rates must be a positive number, not {value}")
