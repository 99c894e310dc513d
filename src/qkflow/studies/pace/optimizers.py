"""The optimizers of a study, over groups by role: AdamW of the lab, and SGD with momentum as published."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import nn

from qkflow.hf.parameter_roles import QK_ROLES
from qkflow.roles import freeze_roles, parameter_roles
from qkflow.studies.pace.config import PaceTrainConfig
from qkflow.training.optimizer import AdamW, LRMultiplier, ParamGroup, clip_grad_norm, parameter_groups
from qkflow.training.pace import parse_ratio_schedule

MOMENTUM = 0.99
WARMUP_FRACTION = 0.1  # share of the run; then a cosine down to zero


class Optimizer(Protocol):
    param_groups: list[ParamGroup]

    def step(self) -> None: ...
    def zero_grad(self) -> None: ...
    def gradients(self) -> list[torch.Tensor]: ...


class SGD(AdamW):
    """Heavy-ball momentum, v ← m·v + g + λ·w, w ← w − η·v, as `torch.optim.SGD`."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for name, parameter in group.parameters.items():
                if parameter.grad is not None:
                    pull = parameter.grad.add(parameter, alpha=group.weight_decay)
                    self.exp_avg[name].mul_(MOMENTUM).add_(pull)
                    parameter.sub_(self.exp_avg[name], alpha=group.lr)


OPTIMIZERS: dict[str, type[AdamW]] = {"adamw": AdamW, "sgd": SGD}


def build_optimizer(model: nn.Module, config: PaceTrainConfig) -> Optimizer:
    """Build the optimizer of a run. The query-key groups follow the schedule of its ratio."""
    schedule = parse_ratio_schedule(config.ratio, config.steps)
    present = set(parameter_roles(model).values())
    multipliers: dict[str, LRMultiplier] = dict.fromkeys(present, config.other_lr_scale)
    paced = [*QK_ROLES, *(["embed"] if config.scale_embed_lr else [])]
    for role in present.intersection(paced):
        multipliers[role] = lambda progress: config.other_lr_scale * schedule(round(progress * config.steps))
    if config.freeze:
        freeze_roles(model, config.freeze)
    groups = parameter_groups(model, config.lr, config.weight_decay, multipliers)
    return OPTIMIZERS[config.optimizer](groups)


def base_lr(lr: float, step: int, steps: int) -> float:
    warmup = max(1, round(WARMUP_FRACTION * steps))
    if step < warmup:
        return lr * (step + 1) / warmup
    return lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def optimizer_step(
    optimizer: Optimizer, loss: torch.Tensor, lr: float, step: int, steps: int, clip: float
) -> None:
    """One step; a loss that is no number ends the run."""
    if not math.isfinite(float(loss.detach())):
        raise FloatingPointError(f"the loss is not a number at step {step}: the learning rate is too high")
    optimizer.zero_grad()
    loss.backward()
    if clip:
        clip_grad_norm(optimizer.gradients(), clip)
    for group in optimizer.param_groups:
        group.set_lr(base_lr(lr, step, steps), step / steps)
    optimizer.step()
