"""A faster query-key circuit with the `Trainer`, in one line.

    Trainer(model, args, train_dataset=data, callbacks=[PaceCallback(20)])

The Trainer keeps its own optimizer, schedule and weight decay. For the length of each optimizer step the
parameters of the query-key circuit stand in groups of their own, with the learning rate of the moment times
the ratio; then the groups are as the Trainer made them. So whatever it schedules, saves and resumes is what
it would be without the callback, and the ratio is all that changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import TrainerCallback

from qkflow.errors import InputError
from qkflow.hf.attach import unwrap_model
from qkflow.hf.parameter_roles import FUSED_QKV_ROLE, QK_ROLES, RoleOverrides, infer_parameter_roles
from qkflow.hf.split_qkv import split_fused_qkv
from qkflow.training.pace import RatioSchedule, parse_ratio_schedule

ParamGroups = list[dict[str, Any]]


class PaceCallback(TrainerCallback):
    """Train the query-key circuit at `ratio` times the learning rate of everything else.

    ratio    a number, `increasing:40`, or a function of the step (see `qkflow.training.pace`)
    qk       the roles that count as the circuit; add "coupling" or "qk_norm" to take those along
    roles    for models whose parameter names are not known: patterns to roles

    Fused query-key-value weights are split when the Trainer is made (see `qkflow.hf.split_qkv`). For a
    callback that is added later, and in a model that `model_init` makes anew, call `hf.split_fused_qkv(model)`
    yourself: the Trainer makes its optimizer before it asks a callback again.
    """

    def __init__(
        self,
        ratio: float | str | RatioSchedule,
        *,
        qk_roles: Iterable[str] = QK_ROLES,
        roles: RoleOverrides | None = None,
    ) -> None:
        self.ratio = ratio
        self.qk_roles = tuple(qk_roles)
        self.roles = roles
        self.schedule: RatioSchedule | None = None
        self.qk_param_ids: set[int] = set()  # ids of the circuit's parameters
        self.split_groups: list[
            tuple[dict[str, Any], ParamGroups]
        ] = []  # while a step is under way: group, its parts
        parse_ratio_schedule(ratio, steps=2**62)  # what is wrong with it is said now, not hours later

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if model is not None and FUSED_QKV_ROLE in infer_parameter_roles(model, self.roles).values():
            split_fused_qkv(model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        self.schedule = parse_ratio_schedule(self.ratio, steps=state.max_steps)
        self.qk_param_ids = self._find_qk_param_ids(unwrap_model(model))
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not self.qk_param_ids & held:
            if FUSED_QKV_ROLE in infer_parameter_roles(unwrap_model(model), self.roles).values():
                raise InputError(
                    "queries, keys and values of this model share one weight, which is split only in a model "
                    "given to the Trainer together with this callback: call hf.split_fused_qkv(model) before "
                    "train(), or inside model_init"
                )
            raise InputError(
                f"the optimizer holds no parameter with a role in {self.qk_roles}: are they frozen, or was the "
                "optimizer made before the model's fused weights were split?"
            )

    def _find_qk_param_ids(self, model: nn.Module) -> set[int]:
        roles = infer_parameter_roles(model, self.roles)
        return {id(parameter) for name, parameter in model.named_parameters() if roles[name] in self.qk_roles}

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        assert self.schedule is not None, "training has begun"
        ratio = self.schedule(state.global_step)
        self.split_groups = [(group, self._split_group(group, ratio)) for group in optimizer.param_groups]
        optimizer.param_groups = [part for _, parts in self.split_groups for part in parts]

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        for group, parts in self.split_groups:
            for part in parts[:1]:  # some optimizers count inside their groups
                group.update({key: value for key, value in part.items() if key not in ("params", "lr")})
        optimizer.param_groups, self.split_groups = [group for group, _ in self.split_groups], []

    def _split_group(self, group: dict[str, Any], ratio: float) -> ParamGroups:
        fast = [parameter for parameter in group["params"] if id(parameter) in self.qk_param_ids]
        slow = [parameter for parameter in group["params"] if id(parameter) not in self.qk_param_ids]
        return [
            {**group, "params": parameters, "lr": group["lr"] * factor}
            for parameters, factor in ((slow, 1.0), (fast, ratio))
            if parameters
        ]
