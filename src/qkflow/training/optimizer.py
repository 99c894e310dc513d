"""Optimizers over parameters grouped by role.

Every trainable parameter is in exactly one group. Matrices have weight decay; vectors and scalars (norms,
biases, step sizes) have none. A role may have a multiple of the learning rate, constant or a function of
progress. `muon` has Muon.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from qkflow.errors import InputError, unknown
from qkflow.roles import ROLES, parameter_roles

# Of the learning rate: a constant, or a function of the completed fraction of the run.
LRMultiplier = float | Callable[[float], float]


@dataclass
class ParamGroup:
    """Parameters of one role with the same weight decay, and their current learning rate."""

    role: str
    weight_decay: float
    lr: float
    lr_multiplier: LRMultiplier = 1.0
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)  # by full name

    def set_lr(self, base_lr: float, progress: float) -> None:
        multiplier = self.lr_multiplier(progress) if callable(self.lr_multiplier) else self.lr_multiplier
        self.lr = base_lr * multiplier


def parameter_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float = 0.0,
    lr_multipliers: Mapping[str, LRMultiplier] | None = None,
    *,
    roles: Mapping[str, str] | None = None,
    decay: Literal["matrices", "all"] = "matrices",
) -> list[ParamGroup]:
    """Return one group per role, kind (matrix or not) and learning rate of the trainable parameters.

    `lr_multipliers` maps a role, or the name of a parameter, to its multiple of the learning rate. `roles`
    replaces the declared roles, by parameter name. `decay="all"` applies weight decay to vectors too. Raise
    InputError for a role that no parameter has, and for a parameter without a role.
    """
    lr_multipliers = lr_multipliers or {}
    roles = parameter_roles(model) if roles is None else roles
    for role in lr_multipliers.keys() - roles.keys():
        if role not in ROLES:
            raise unknown("role", role, ROLES)
        if role not in roles.values():
            raise InputError(
                f"a learning-rate multiplier is set for the role '{role}', but no parameter has it",
                code="role-without-parameters",
            )
    groups: dict[tuple[str, bool, LRMultiplier], ParamGroup] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        role, is_matrix = roles[name], parameter.dim() >= 2
        multiplier = lr_multipliers.get(name, lr_multipliers.get(role, 1.0))
        if (role, is_matrix, multiplier) not in groups:
            rate = weight_decay if is_matrix or decay == "all" else 0.0
            group = groups[role, is_matrix, multiplier] = ParamGroup(role, rate, lr, multiplier)
            group.set_lr(lr, 0.0)
        groups[role, is_matrix, multiplier].parameters[name] = parameter
    check_param_groups(model, list(groups.values()))
    return list(groups.values())


def check_param_groups(model: nn.Module, param_groups: list[ParamGroup]) -> None:
    """Raise InputError unless every trainable parameter is in exactly one group."""
    seen: dict[int, str] = {}
    for group in param_groups:
        for name, parameter in group.parameters.items():
            if id(parameter) in seen:
                raise InputError(
                    f"parameter {name} is in two groups (also as {seen[id(parameter)]})",
                    code="parameter-in-two-groups",
                )
            seen[id(parameter)] = name
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in seen]
    if missing:
        raise InputError(f"no group contains {', '.join(missing)}", code="parameter-without-group")


class Optimizer(ABC):
    """Base class. State is kept by parameter name, as checkpoints need it."""

    def __init__(self, param_groups: list[ParamGroup]) -> None:
        self.param_groups = param_groups

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for group in self.param_groups for name, p in group.parameters.items()}

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters().values() if p.grad is not None]

    def zero_grad(self) -> None:
        for parameter in self.parameters().values():
            parameter.grad = None

    def set_lr(self, base_lr: float, progress: float) -> None:
        for group in self.param_groups:
            group.set_lr(base_lr, progress)

    @abstractmethod
    def step(self) -> None:
        """Update every parameter that has a gradient."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Return the state tensors themselves by name; copying values into them restores the state."""


class AdamW(Optimizer):
    """AdamW (Loshchilov & Hutter 2019), bit-identical to `torch.optim.AdamW(fused=True)`.

    Calls PyTorch's fused kernel directly: creating a `torch.optim` optimizer imports the compiler, which adds
    1.3 s of CPU time to the start of every run. The kernel is not public API. If PyTorch has no op of this
    name, `torch.optim.AdamW` updates the same state tensors.
    """

    def __init__(
        self, param_groups: list[ParamGroup], beta1: float = 0.9, beta2: float = 0.95, eps: float = 1e-8
    ) -> None:
        super().__init__(param_groups)
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        parameters = self.parameters()
        self.exp_avg = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.exp_avg_sq = {name: torch.zeros_like(p) for name, p in parameters.items()}
        device = next(iter(parameters.values())).device if parameters else None
        self.step_count = torch.zeros((), dtype=torch.float32, device=device)
        self._fallback = None if hasattr(torch, "_fused_adamw_") else self._torch_optimizer()

    @torch.no_grad()
    def step(self) -> None:
        self.step_count += 1
        if self._fallback is not None:
            self._step_fallback(self._fallback)
            return
        for group in self.param_groups:
            trained = {name: p for name, p in group.parameters.items() if p.grad is not None}
            if not trained:
                continue
            torch._fused_adamw_(
                list(trained.values()),
                [p.grad for p in trained.values() if p.grad is not None],
                [self.exp_avg[name] for name in trained],
                [self.exp_avg_sq[name] for name in trained],
                [],
                [self.step_count] * len(trained),
                lr=group.lr,
                beta1=self.beta1,
                beta2=self.beta2,
                weight_decay=group.weight_decay,
                eps=self.eps,
                amsgrad=False,
                maximize=False,
            )
            # The kernel skips autograd's version counters, which detect changed tensors in a later backward.
            torch.autograd.graph.increment_version(list(trained.values()))

    def _torch_optimizer(self) -> torch.optim.AdamW:
        options = {"betas": (self.beta1, self.beta2), "eps": self.eps, "fused": True}
        groups = [{"params": list(group.parameters.values())} for group in self.param_groups]
        optimizer = torch.optim.AdamW(groups, **options)  # type: ignore[arg-type]
        for name, parameter in self.parameters().items():
            optimizer.state[parameter] = {
                "step": torch.zeros_like(self.step_count),
                "exp_avg": self.exp_avg[name],
                "exp_avg_sq": self.exp_avg_sq[name],
            }
        return optimizer

    def _step_fallback(self, optimizer: torch.optim.AdamW) -> None:
        for group, options in zip(self.param_groups, optimizer.param_groups, strict=True):
            options |= {"lr": group.lr, "weight_decay": group.weight_decay}
        for state in optimizer.state.values():
            state["step"].copy_(self.step_count - 1)
        optimizer.step()

    def state_dict(self) -> dict[str, Tensor]:
        return {
            "optimizer.steps": self.step_count,
            **{f"optimizer.mean.{name}": tensor for name, tensor in self.exp_avg.items()},
            **{f"optimizer.square.{name}": tensor for name, tensor in self.exp_avg_sq.items()},
        }


class SGD(Optimizer):
    """SGD with momentum as in `torch.optim.SGD`: v ← m·v + g + λ·w, w ← w − η·v."""

    def __init__(self, param_groups: list[ParamGroup], momentum: float = 0.9) -> None:
        super().__init__(param_groups)
        self.momentum = momentum
        self.momentum_buffer = {name: torch.zeros_like(p) for name, p in self.parameters().items()}

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for name, parameter in group.parameters.items():
                if parameter.grad is not None:
                    decayed = parameter.grad.add(parameter, alpha=group.weight_decay)
                    self.momentum_buffer[name].mul_(self.momentum).add_(decayed)
                    parameter.sub_(self.momentum_buffer[name], alpha=group.lr)

    def state_dict(self) -> dict[str, Tensor]:
        return {f"optimizer.momentum.{name}": tensor for name, tensor in self.momentum_buffer.items()}


@torch.no_grad()
def clip_grad_norm(gradients: list[Tensor], max_norm: float) -> Tensor:
    """Scale gradients in place to a total norm of at most `max_norm` (0: no limit).

    Return the norm before scaling.
    """
    norm = nn.utils.get_total_norm(gradients)
    if hasattr(norm, "full_tensor"):  # FSDP: reduce over all processes
        norm = norm.full_tensor()
    if max_norm:
        # Reading the norm on a CPU needs no synchronization, and most steps have nothing to scale.
        if norm.device.type == "cpu" and norm <= max_norm:
            return norm
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
