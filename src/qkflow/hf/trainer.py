"""`Trainer` callback for a higher learning rate of the query-key circuit.

    Trainer(model, args, train_dataset=data, callbacks=[PaceCallback(20)])

The Trainer keeps its optimizer, schedule and weight decay. Only during each optimizer step, the parameters of
the query-key circuit are in groups of their own with learning rate lr·ratio; afterwards the groups are the
Trainer's again. So schedulers, checkpoints and resuming work as without the callback.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import TrainerCallback

from qkflow.errors import InputError
from qkflow.hf.attach import unwrap_model
from qkflow.hf.parameter_roles import FUSED_QKV_ROLE, RoleOverrides, infer_parameter_roles
from qkflow.hf.split_qkv import split_fused_qkv
from qkflow.roles import QK_ROLES
from qkflow.training.pace import RatioSchedule, parse_ratio_schedule

ParamGroups = list[dict[str, Any]]


class PaceCallback(TrainerCallback):
    """Train the query-key circuit at `ratio` times the learning rate of the other parameters.

    ratio      a number, `increasing:40`, or a function of the step (see `qkflow.training.pace`)
    qk_roles   roles of the circuit; add "coupling" or "qk_norm" to include those
    roles      name patterns to roles, for models whose parameter names are not known

    Fused query-key-value weights are split when the Trainer is created (see `qkflow.hf.split_qkv`). With
    `add_callback` or `model_init`, call `hf.split_fused_qkv(model)` yourself: the Trainer then creates its
    optimizer before it calls the callback.
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
        self.qk_param_ids: set[int] = set()
        self.split_groups: list[tuple[dict[str, Any], ParamGroups]] = []  # during a step: group, its parts
        parse_ratio_schedule(ratio, steps=2**62)  # raises for an invalid ratio

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if model is not None and FUSED_QKV_ROLE in infer_parameter_roles(model, self.roles).values():
            split_fused_qkv(model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        self.schedule = parse_ratio_schedule(self.ratio, steps=state.max_steps)
        self.qk_param_ids = self._find_qk_param_ids(unwrap_model(model))
        optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not self.qk_param_ids & optimized:
            if FUSED_QKV_ROLE in infer_parameter_roles(unwrap_model(model), self.roles).values():
                raise InputError(
                    "queries, keys and values of this model are one fused weight, which PaceCallback splits "
                    "only if the Trainer is created with both: call hf.split_fused_qkv(model) before "
                    "train(), or in model_init",
                    code="fused-qkv",
                )
            raise InputError(
                f"the optimizer has no parameter with a role in {self.qk_roles}: unfreeze them, and create "
                "the optimizer after hf.split_fused_qkv",
                code="no-qk-parameters",
            )

    def _find_qk_param_ids(self, model: nn.Module) -> set[int]:
        roles = infer_parameter_roles(model, self.roles)
        return {id(parameter) for name, parameter in model.named_parameters() if roles[name] in self.qk_roles}

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        assert self.schedule is not None, "on_train_begin has run"
        ratio = self.schedule(state.global_step)
        self.split_groups = [(group, self._split_group(group, ratio)) for group in optimizer.param_groups]
        optimizer.param_groups = [part for _, parts in self.split_groups for part in parts]

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        for group, parts in self.split_groups:
            for part in parts[:1]:  # some optimizers keep state in their groups
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
