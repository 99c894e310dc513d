"""The optimizers of a study, over groups by role: AdamW of the lab, and SGD with momentum as published."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from qkflow.errors import unknown
from qkflow.hf.parameter_roles import QK
from qkflow.roles import freeze, parameter_roles
from qkflow.training.optimizer import AdamW, Group, Multiplier, clip_gradients, parameter_groups
from qkflow.training.pace import ratio_schedule

MOMENTUM = 0.99
WARMUP = 0.1  # share of the run; then a cosine down to zero


class Optimizer(Protocol):
    groups: list[Group]

    def step(self) -> None: ...
    def zero_grad(self) -> None: ...
    def gradients(self) -> list[torch.Tensor]: ...


class SGD(AdamW):
    """Heavy-ball momentum, v ← m·v + g + λ·w, w ← w − η·v, as `torch.optim.SGD`."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.groups:
            for name, parameter in group.parameters.items():
                if parameter.grad is not None:
                    pull = parameter.grad.add(parameter, alpha=group.weight_decay)
                    self.mean[name].mul_(MOMENTUM).add_(pull)
                    parameter.sub_(self.mean[name], alpha=group.lr)


OPTIMIZERS: dict[str, type[AdamW]] = {"adamw": AdamW, "sgd": SGD}


def build_optimizer(model: nn.Module, train: Mapping[str, Any]) -> Optimizer:
    """What a run's `train` section asks for; only `ratio` differs between the runs of a single-knob study."""
    if train["optimizer"] not in OPTIMIZERS:
        raise unknown("optimizer", train["optimizer"], OPTIMIZERS)
    steps = int(train["steps"])
    schedule = ratio_schedule(train["ratio"], steps)
    others = float(train["others"])
    present = set(parameter_roles(model).values())
    multipliers: dict[str, Multiplier] = dict.fromkeys(present, others)
    paced = [*QK, *(["embed"] if train["embed"] else [])]
    for role in present.intersection(paced):
        multipliers[role] = lambda progress: others * schedule(round(progress * steps))
    if train["freeze"]:
        freeze(model, train["freeze"])
    groups = parameter_groups(model, float(train["lr"]), float(train["weight_decay"]), multipliers)
    return OPTIMIZERS[train["optimizer"]](groups)


def base_rate(lr: float, step: int, steps: int) -> float:
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return lr * (step + 1) / warmup
    return lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def descend(optimizer: Optimizer, loss: torch.Tensor, lr: float, step: int, steps: int, clip: float) -> None:
    """One step; a loss that is no number ends the run."""
    if not math.isfinite(float(loss.detach())):
        raise FloatingPointError(f"the loss is not a number at step {step}: the learning rate is too high")
    optimizer.zero_grad()
    loss.backward()
    if clip:
        clip_gradients(optimizer.gradients(), clip)
    for group in optimizer.groups:
        group.set_lr(base_rate(lr, step, steps), step / steps)
    optimizer.step()
