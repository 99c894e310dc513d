"""How long a run lasts, and how its learning rate moves meanwhile."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qkflow.training.config import DEFAULT_TOKENS, TrainConfig


@dataclass(frozen=True)
class Budget:
    """Counted in steps, or in seconds of training."""

    steps: int | None
    seconds: float | None

    @classmethod
    def from_config(cls, config: TrainConfig, length: int) -> Budget:
        if config.minutes is not None:
            return cls(None, 60 * config.minutes)
        if config.steps is not None:
            return cls(config.steps, None)
        return cls(math.ceil((config.tokens or DEFAULT_TOKENS) / (config.batch_size * length)), None)

    def progress(self, step: int, seconds: float) -> float:
        """The share of the run that is over after `step` steps and `seconds`; 1 at the end."""
        share = step / self.steps if self.steps is not None else seconds / (self.seconds or 1.0)
        return min(1.0, share)


def crosses_milestone(before: float, after: float, n_milestones: int) -> bool:
    """Whether progress passed one of `times` evenly spaced moments, the last of which is the end."""
    # a moment that is hit exactly must not be missed to rounding
    return math.floor(after * n_milestones + 1e-9) > math.floor(before * n_milestones + 1e-9)


def learning_rate(config: TrainConfig, budget: Budget, step: int, seconds: float) -> float:
    """The learning rate of step number `step` (from 0), begun after `seconds` of training.

    Warm-up is linear. Then `cosine` falls to final_lr·lr at the end; `wsd` (warm-up, stable, decay) stays at
    lr and falls linearly in the last `decay` of the run; `constant` stays.
    """
    progress = budget.progress(step, seconds)
    if config.warmup >= 1:
        warm = (step + 1) / config.warmup
    elif config.warmup > 0:
        warm = max(budget.progress(step + 1, seconds), 1e-4) / config.warmup
    else:
        warm = 1.0
    return config.lr * min(1.0, warm) * _decay_factor(config, progress)


def _decay_factor(config: TrainConfig, progress: float) -> float:
    if config.schedule == "cosine":
        return config.min_lr_factor + (1 - config.min_lr_factor) * 0.5 * (1 + math.cos(math.pi * progress))
    if config.schedule == "wsd" and config.decay_ratio:
        fallen = max(0.0, (progress - (1 - config.decay_ratio)) / config.decay_ratio)
        return 1 - (1 - config.min_lr_factor) * fallen
    return 1.0
