"""Does the gate open, and what does the slow path say through it?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qkflow.models.slow_path.gate import Gate
from qkflow.models.slow_path.path import SlowPath


@torch.no_grad()
def slow_path_metrics(
    model: nn.Module, ids: Tensor | None = None, document_ids: Tensor | None = None
) -> dict[str, float | list[float]]:
    """What a training run logs of the slow path of `model`; an empty dict where there is none.

    slow_gate        |g| of each gate, the mean over its channels
    slow_share       ‖g⊙ũ‖/‖x‖ at each gate, on the tokens `ids` (B, T); left out without them
    slow_grad_norm   norm of the slow weights' gradient as it stands, before or after clipping; left out
                     where there is none
    slow_grad_share  the same relative to the whole gradient, which clipping does not change
    """
    path = next((module for module in model.modules() if isinstance(module, SlowPath)), None)
    if path is None:
        return {}
    gates: dict[str, Any] = dict(path.gates.items())
    found: dict[str, float | list[float]] = {
        "slow_gate": [_to_float(gate.value.abs().mean()) for gate in gates.values()]
    }
    if ids is not None:
        found["slow_share"] = _relative_norms(model, gates, ids, document_ids)
    slow = _gradients(path.blocks) + _gradients(path.phi)
    if slow:
        norm = _to_float(nn.utils.get_total_norm(slow))
        everything = _to_float(nn.utils.get_total_norm(_gradients(model)))
        found["slow_grad_norm"] = norm
        found["slow_grad_share"] = norm / everything if everything else 0.0
    return found


def _relative_norms(
    model: nn.Module, gates: dict[str, Gate], ids: Tensor, document_ids: Tensor | None
) -> list[float]:
    """‖g⊙ũ‖/‖x‖ at each gate, in one pass over `ids`."""
    shares: list[float] = []

    def listen(gate: Gate, inputs: tuple[Tensor, Tensor]) -> None:
        x, heard = inputs
        shares.append(_to_float((gate.value * heard).norm() / x.norm()))

    hooks = [gate.register_forward_pre_hook(listen) for gate in gates.values()]
    training = model.training
    try:
        model.eval()
        model.forward(ids, document_ids=document_ids)  # not model(…): what is compiled calls no hooks
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return shares


def _gradients(module: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def _to_float(value: Any) -> float:
    return float(value.full_tensor() if hasattr(value, "full_tensor") else value)  # of sharded parameters
