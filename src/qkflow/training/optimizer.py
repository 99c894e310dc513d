"""AdamW over parameters grouped by role.

Every parameter is in exactly one group. Matrices decay, vectors (norms, biases, step sizes) do not. A role
may learn at a multiple of the learning rate, which may change as the run goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from qkflow.errors import InputError, unknown
from qkflow.roles import ROLES, parameter_roles

# of the learning rate: fixed, or a function of the share of the run that is over
LRMultiplier = float | Callable[[float], float]


@dataclass
class ParamGroup:
    """Parameters of one role that decay or do not, with the learning rate they have now."""

    role: str
    weight_decay: float
    lr: float
    lr_multiplier: LRMultiplier = 1.0
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)  # by full name

    def set_lr(self, base_lr: float, progress: float) -> None:
        self.lr = base_lr * (
            self.lr_multiplier(progress) if callable(self.lr_multiplier) else self.lr_multiplier
        )


def parameter_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float = 0.0,
    lr_multipliers: Mapping[str, LRMultiplier] | None = None,
    *,
    roles: Mapping[str, str] | None = None,
    decay: Literal["matrices", "all"] = "matrices",
) -> list[ParamGroup]:
    """One group a role and kind (matrix or not), of every parameter that learns.

    `multipliers` maps a role to its multiple of the learning rate. A role that no parameter of the model has
    is an error, as is a parameter without a role. `roles` replaces the declared ones (by parameter name).
    """
    lr_multipliers = lr_multipliers or {}
    roles = parameter_roles(model) if roles is None else roles
    for role in lr_multipliers:
        if role not in ROLES:
            raise unknown("role", role, ROLES)
        if role not in roles.values():
            raise InputError(
                f"no parameter has the role '{role}' that a learning-rate multiplier is given for"
            )
    groups: dict[tuple[str, bool], ParamGroup] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        role, matrix = roles[name], parameter.dim() >= 2
        if (role, matrix) not in groups:
            rate = weight_decay if matrix or decay == "all" else 0.0
            group = groups[role, matrix] = ParamGroup(role, rate, lr, lr_multipliers.get(role, 1.0))
            group.set_lr(lr, 0.0)
        groups[role, matrix].parameters[name] = parameter
    check_param_groups(model, list(groups.values()))
    return list(groups.values())


def check_param_groups(model: nn.Module, param_groups: list[ParamGroup]) -> None:
    """Every learning parameter exactly once, or an error."""
    seen: dict[int, str] = {}
    for group in param_groups:
        for name, parameter in group.parameters.items():
            if id(parameter) in seen:
                raise InputError(f"parameter {name} is in two groups (also as {seen[id(parameter)]})")
            seen[id(parameter)] = name
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in seen]
    if missing:
        raise InputError(f"no group holds {', '.join(missing)}")


def pace_lr_multipliers(pace: float | Mapping[str, Any] | None, model: nn.Module) -> dict[str, LRMultiplier]:
    """What `train.pace` asks for: the query-key circuit learns `ratio` times as fast as everything else."""
    if pace is None:
        return {}
    options = dict(pace) if isinstance(pace, Mapping) else {"ratio": pace}
    ratio = options.pop("ratio", 1.0)
    for key in options:
        raise unknown("key of train.pace", key, ["ratio"])
    if not isinstance(ratio, int | float) or not ratio > 0:
        raise InputError(f"train.pace: the ratio must be above zero, not {ratio}")
    present = set(parameter_roles(model).values())
    return {role: float(ratio) for role in ("q", "k", "qk") if role in present}


class AdamW:
    """AdamW (Loshchilov & Hutter 2019) through PyTorch's fused kernel.

    The same numbers as `torch.optim.AdamW(fused=True)`, whose first use imports the compiler, which doubles
    the time a run needs to start. State is kept by parameter name, which is what checkpoints need.
    """

    def __init__(
        self, param_groups: list[ParamGroup], beta1: float = 0.9, beta2: float = 0.95, eps: float = 1e-8
    ) -> None:
        self.param_groups, self.beta1, self.beta2, self.eps = param_groups, beta1, beta2, eps
        parameters = {name: p for group in param_groups for name, p in group.parameters.items()}
        self.exp_avg = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.exp_avg_sq = {name: torch.zeros_like(p) for name, p in parameters.items()}
        device = next(iter(parameters.values())).device if parameters else None
        self.step_count = torch.zeros((), dtype=torch.float32, device=device)

    def gradients(self) -> list[Tensor]:
        return [
            p.grad for group in self.param_groups for p in group.parameters.values() if p.grad is not None
        ]

    def zero_grad(self) -> None:
        for group in self.param_groups:
            for parameter in group.parameters.values():
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        self.step_count += 1
        for group in self.param_groups:
            learning = {name: p for name, p in group.parameters.items() if p.grad is not None}
            if not learning:
                continue
            torch._fused_adamw_(
                list(learning.values()),
                [p.grad for p in learning.values() if p.grad is not None],
                [self.exp_avg[name] for name in learning],
                [self.exp_avg_sq[name] for name in learning],
                [],
                [self.step_count] * len(learning),
                lr=group.lr,
                beta1=self.beta1,
                beta2=self.beta2,
                weight_decay=group.weight_decay,
                eps=self.eps,
                amsgrad=False,
                maximize=False,
            )
            # The kernel writes behind autograd's back; whoever keeps what they made of a weight must notice.
            torch.autograd.graph.increment_version(list(learning.values()))

    def state_dict(self) -> dict[str, Tensor]:
        """All state by name, the very tensors: copying into them restores it."""
        return {
            "optimizer.steps": self.step_count,
            **{f"optimizer.mean.{name}": tensor for name, tensor in self.exp_avg.items()},
            **{f"optimizer.square.{name}": tensor for name, tensor in self.exp_avg_sq.items()},
        }


@torch.no_grad()
def clip_grad_norm(gradients: list[Tensor], max_norm: float) -> Tensor:
    """The norm of all gradients together, before they were scaled down to `limit` (0 = any)."""
    norm = nn.utils.get_total_norm(gradients)
    if hasattr(norm, "full_tensor"):  # sharded: of all shards
        norm = norm.full_tensor()
    if max_norm:
        # on a processor the value is at hand, and most steps have nothing to scale
        if norm.device.type == "cpu" and norm <= max_norm:
            return norm
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
