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
from qkflow.hf.attach import inner_model
from qkflow.hf.parameter_roles import FUSED_ROLE, QK, Roles, roles_of
from qkflow.hf.split_qkv import split_fused
from qkflow.training.pace import RatioSchedule, ratio_schedule

Groups = list[dict[str, Any]]


class PaceCallback(TrainerCallback):
    """Train the query-key circuit at `ratio` times the learning rate of everything else.

    ratio    a number, `increasing:40`, or a function of the step (see `qkflow.training.pace`)
    qk       the roles that count as the circuit; add "coupling" or "qk_norm" to take those along
    roles    for models whose parameter names are not known: patterns to roles

    Fused query-key-value weights are split when the Trainer is made (see `qkflow.hf.split_qkv`). For a
    callback that is added later, and in a model that `model_init` makes anew, call `hf.split_fused(model)`
    yourself: the Trainer makes its optimizer before it asks a callback again.
    """

    def __init__(
        self, ratio: float | str | RatioSchedule, *, qk: Iterable[str] = QK, roles: Roles | None = None
    ) -> None:
        self.ratio = ratio
        self.qk = tuple(qk)
        self.roles = roles
        self.schedule: RatioSchedule | None = None
        self.fast: set[int] = set()  # ids of the circuit's parameters
        self.cuts: list[tuple[dict[str, Any], Groups]] = []  # while a step is under way: group, its parts
        ratio_schedule(ratio, steps=2**62)  # what is wrong with it is said now, not hours later

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if model is not None and FUSED_ROLE in roles_of(model, self.roles).values():
            split_fused(model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        self.schedule = ratio_schedule(self.ratio, steps=state.max_steps)
        self.fast = self._circuit(inner_model(model))
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not self.fast & held:
            if FUSED_ROLE in roles_of(inner_model(model), self.roles).values():
                raise InputError(
                    "queries, keys and values of this model share one weight, which is split only in a model "
                    "given to the Trainer together with this callback: call hf.split_fused(model) before "
                    "train(), or inside model_init"
                )
            raise InputError(
                f"the optimizer holds no parameter with a role in {self.qk}: are they frozen, or was the "
                "optimizer made before the model's fused weights were split?"
            )

    def _circuit(self, model: nn.Module) -> set[int]:
        roles = roles_of(model, self.roles)
        return {id(parameter) for name, parameter in model.named_parameters() if roles[name] in self.qk}

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        assert self.schedule is not None, "training has begun"
        ratio = self.schedule(state.global_step)
        self.cuts = [(group, self._cut(group, ratio)) for group in optimizer.param_groups]
        optimizer.param_groups = [part for _, parts in self.cuts for part in parts]

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        for group, parts in self.cuts:
            for part in parts[:1]:  # some optimizers count inside their groups
                group.update({key: value for key, value in part.items() if key not in ("params", "lr")})
        optimizer.param_groups, self.cuts = [group for group, _ in self.cuts], []

    def _cut(self, group: dict[str, Any], ratio: float) -> Groups:
        fast = [parameter for parameter in group["params"] if id(parameter) in self.fast]
        slow = [parameter for parameter in group["params"] if id(parameter) not in self.fast]
        return [
            {**group, "params": parameters, "lr": group["lr"] * factor}
            for parameters, factor in ((slow, 1.0), (fast, ratio))
            if parameters
        ]
