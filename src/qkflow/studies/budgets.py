"""Training budgets: the measured cost of a model, and the steps that fit into a number of minutes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from statistics import mean, median

from qkflow.errors import InputError
from qkflow.studies.grid import COST_STEPS


@dataclass(frozen=True)
class TrainingCost:
    """Cost of a model. `overhead_seconds` is the time of a run outside its steps (start-up, evaluation)."""

    token_seconds: float
    flops_per_token: float
    overhead_seconds: float

    @classmethod
    def median_of(cls, costs: Sequence[TrainingCost]) -> TrainingCost:
        return cls(*(median(values) for values in zip(*map(astuple, costs), strict=True)))

    @classmethod
    def mean_of(cls, costs: Sequence[TrainingCost]) -> TrainingCost:
        return cls(*(mean(values) for values in zip(*map(astuple, costs), strict=True)))


def affordable_steps(minutes: float, n_runs: int, jobs: int, cost: TrainingCost, tokens_per_step: int) -> int:
    """Return the steps per run with which `n_runs` runs, `jobs` at a time, finish in `minutes`."""
    rounds, step_seconds = math.ceil(n_runs / jobs), cost.token_seconds * tokens_per_step
    steps = int((60 * minutes / rounds - cost.overhead_seconds) / step_seconds)
    if steps < COST_STEPS:
        least = rounds * (cost.overhead_seconds + COST_STEPS * step_seconds) / 60
        raise InputError(
            f"--minutes {minutes:g} is too short for {n_runs} runs, {jobs} at a time: "
            f"use at least {least:.2g}, or fewer variants, inits or seeds",
            code="minutes-too-short",
        )
    return steps
