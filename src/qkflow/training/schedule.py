"""The budget of a run and its learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qkflow.training.config import DEFAULT_TOKENS, TrainConfig


@dataclass(frozen=True)
class Budget:
    """Length of a run, either in steps or in seconds of training."""

    steps: int | None
    seconds: float | None

    @classmethod
    def from_config(cls, config: TrainConfig, seq_len: int) -> Budget:
        if config.minutes is not None:
            return cls(None, 60 * config.minutes)
        if config.steps is not None:
            return cls(config.steps, None)
        return cls(math.ceil((config.tokens or DEFAULT_TOKENS) / (config.batch_size * seq_len)), None)

    def progress(self, step: int, seconds: float) -> float:
        """Return the completed fraction of the run after `step` steps and `seconds`; 1 at the end."""
        fraction = step / self.steps if self.steps is not None else seconds / (self.seconds or 1.0)
        return min(1.0, fraction)


def crosses_milestone(before: float, after: float, n_milestones: int) -> bool:
    """Return whether progress passed one of `n_milestones` evenly spaced points, the last of which is 1."""
    # 1e-9: a milestone that is reached exactly must not be missed by rounding
    return math.floor(after * n_milestones + 1e-9) > math.floor(before * n_milestones + 1e-9)


def learning_rate(config: TrainConfig, budget: Budget, step: int, seconds: float) -> float:
    """Return the learning rate of step `step` (from 0), which begins after `seconds` of training.

    Linear warmup multiplies the decay of `config.schedule` over the whole run. `cosine` decays to
    min_lr_factor·lr; `wsd` (warmup-stable-decay) decays linearly in the last `decay_ratio` of the run;
    `constant` does not decay.
    """
    progress = budget.progress(step, seconds)
    if config.warmup >= 1:
        warmup = (step + 1) / config.warmup
    elif config.warmup > 0:
        warmup = max(budget.progress(step + 1, seconds), 1e-4) / config.warmup
    else:
        warmup = 1.0
    return config.lr * min(1.0, warmup) * _decay_factor(config, progress)


def warmup_cosine_factor(step: int, steps: int, warmup_steps: int, min_factor: float = 0.0) -> float:
    """Return the learning-rate factor of step `step` (from 0): linear warmup, then cosine to `min_factor`.

    Unlike `learning_rate`, the cosine begins at the end of the warmup.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return cosine_factor((step - warmup_steps) / max(1, steps - warmup_steps), min_factor)


def cosine_factor(progress: float, min_factor: float = 0.0) -> float:
    """Return the factor of a cosine from 1 at progress 0 to `min_factor` at progress 1."""
    return min_factor + (1 - min_factor) * 0.5 * (1 + math.cos(math.pi * progress))


def _decay_factor(config: TrainConfig, progress: float) -> float:
    if config.schedule == "cosine":
        return cosine_factor(progress, config.min_lr_factor)
    if config.schedule == "wsd" and config.decay_ratio:
        decayed = max(0.0, (progress - (1 - config.decay_ratio)) / config.decay_ratio)
        return 1 - (1 - config.min_lr_factor) * decayed
    return 1.0
