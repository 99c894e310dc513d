"""Pace: the learning rate of the query-key circuit relative to all other parameters.

A ratio schedule is a function of the step and has no state. It multiplies the learning rate of the query-key
parameters on top of the base schedule (warmup, decay) of all parameters.

| written | ratio at step s of S |
|---|---|
| `20` | 20 |
| `increasing:40` | 1 + (40 − 1)·s/S, the increasing schedule of Vashisht & Ramaswamy (2026) |
| `increasing:40:steps=1000` | the same over the first 1,000 steps, then 40 |
| `early:0.25` | 0.25 over the first fifth of the run, then 1 |
| `early:0.25:steps=1000` | 0.25 over the first 1,000 steps, then 1 |

`{ratio: RATIO, layers: LAYERS}` limits a ratio to some layers: `upper` or `lower` (half of them), or a list
of indices from 0. Zhu et al. (2026, arXiv 2605.10504) slow the query-key circuit of upper layers early.
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
from qkflow.models import Decoder
from qkflow.roles import QK_ROLES, parameter_roles
from qkflow.training.optimizer import LRMultiplier

BaseSchedule = Callable[[int], float]  # learning-rate factor of every group at a step
# Steps into which a run with a time budget is divided: its number of optimizer steps is not known in advance.
TIMED_RUN_STEPS = 1_000_000
EARLY_SHARE = 0.2  # of the run, for `early` without a number of steps

Layers = str | list[int]  # "upper", "lower" or indices from 0


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
        _check_steps(self.steps)

    def __call__(self, step: int) -> float:
        return 1 + (self.final_ratio - 1) * min(step / self.steps, 1.0)


@dataclass(frozen=True)
class EarlyRatio:
    """r(s) = F before step S, then 1."""

    early_ratio: float
    steps: int

    def __post_init__(self) -> None:
        _check_positive(self.early_ratio)
        _check_steps(self.steps)

    def __call__(self, step: int) -> float:
        return self.early_ratio if step < self.steps else 1.0


def parse_ratio_schedule(ratio: str | float | RatioSchedule, steps: int) -> RatioSchedule:
    """Return the schedule written as `ratio` for a run of `steps` steps."""
    if callable(ratio):
        return _check_ramp_fits(ratio, steps)
    kind, _, rest = str(ratio).partition(":")
    try:
        if kind not in ("increasing", "early"):
            return ConstantRatio(float(str(ratio)))
        factor, _, option = rest.partition(":")
        name, _, value = option.partition("=")
        if name not in ("", "steps"):
            raise ValueError
        if kind == "early":
            default = max(1, round(EARLY_SHARE * steps))
            return _check_ramp_fits(EarlyRatio(float(factor), int(value) if name else default), steps)
        return _check_ramp_fits(IncreasingRatio(float(factor), int(value) if name else steps), steps)
    except InputError:
        raise
    except ValueError:
        raise InputError(
            f"'{ratio}' is not a ratio: write a number such as 20, increasing:FACTOR[:steps=N] or "
            "early:FACTOR[:steps=N]",
            code="invalid-ratio",
        ) from None


def check_pace(pace: float | str | Mapping[str, Any], *, in_minutes: bool) -> None:
    """Raise InputError for an invalid `train.pace`; `in_minutes`: the budget of the run is a time."""
    ratio, _ = _split_pace(pace)
    parse_ratio_schedule(ratio, TIMED_RUN_STEPS if in_minutes else 2**62)
    if in_minutes and "steps=" in str(ratio):
        raise InputError(
            f"train.pace '{ratio}' counts steps, but train.minutes sets the budget: leave out "
            "steps=N, or set train.steps",
            code="pace-needs-steps",
        )


def pace_lr_multipliers(
    pace: float | str | Mapping[str, Any] | None, model: nn.Module, steps: int | None = None
) -> dict[str, LRMultiplier]:
    """Return the learning-rate multipliers of `model` for `train.pace`.

    By query-key role, or by parameter name if the pace is limited to some layers. `steps` is the number of
    steps of the run; None: the run has a time budget.
    """
    if pace is None:
        return {}
    ratio, layers = _split_pace(pace)
    total = steps or TIMED_RUN_STEPS
    schedule = parse_ratio_schedule(ratio, total)

    def at_progress(progress: float) -> float:
        return schedule(round(progress * total))

    multiplier = schedule.ratio if isinstance(schedule, ConstantRatio) else at_progress
    roles = parameter_roles(model)
    if layers is None:
        return {role: multiplier for role in QK_ROLES if role in roles.values()}
    return {name: multiplier for name in _names_in_layers(model, layers) if roles[name] in QK_ROLES}


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


def _split_pace(pace: float | str | Mapping[str, Any]) -> tuple[float | str, Layers | None]:
    """Return ratio and layers of `train.pace`, which may be written as `{ratio: 4, layers: upper}`."""
    if not isinstance(pace, Mapping):
        return pace, None
    for key in pace:
        if key not in ("ratio", "layers"):
            raise unknown_key("train.pace", str(key), ["ratio", "layers"])
    layers = pace.get("layers")
    is_list = isinstance(layers, list) and layers and all(type(item) is int for item in layers)
    if layers not in (None, "upper", "lower") and not is_list:
        raise InputError(
            f"the layers of train.pace must be upper, lower or a list such as [0, 1], not {layers!r}",
            code="invalid-pace-layers",
        )
    return pace.get("ratio", 1.0), layers


def _names_in_layers(model: nn.Module, layers: Layers) -> list[str]:
    assert isinstance(model, Decoder)
    n_layers = len(model.blocks)
    halves = {"lower": range(n_layers // 2), "upper": range(n_layers // 2, n_layers)}
    indices = halves[layers] if isinstance(layers, str) else layers
    for index in indices:
        if not 0 <= index < n_layers:
            raise InputError(
                f"train.pace names layer {index}, but the model has layers 0 to {n_layers - 1}",
                code="invalid-pace-layers",
            )
    prefixes = [f"blocks.{index}" for index in indices]
    return [
        name for prefix in prefixes for name, _ in model.get_submodule(prefix).named_parameters(prefix=prefix)
    ]


def _check_ramp_fits(schedule: RatioSchedule, steps: int) -> RatioSchedule:
    needed = getattr(schedule, "steps", 0)
    if needed > steps:
        raise InputError(
            f"the ratio changes over {needed} steps, but the run has only {steps}",
            code="ratio-ramp-too-long",
        )
    return schedule


def _check_positive(ratio: float) -> None:
    if not ratio > 0 or not math.isfinite(ratio):
        raise InputError(
            f"the ratio of learning rates must be a positive number, not {ratio}", code="invalid-ratio"
        )


def _check_steps(steps: int) -> None:
    if steps < 1:
        raise InputError(f"a schedule of the ratio needs at least 1 step, not {steps}", code="invalid-ratio")
