"""Metrics of the slow path: its gates, its share of the residual stream, its gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qkflow.attention.inference import eval_mode
from qkflow.models.slow_path.gate import Gate
from qkflow.models.slow_path.path import SlowPath


@torch.no_grad()
def slow_path_metrics(
    model: nn.Module, ids: Tensor | None = None, document_ids: Tensor | None = None
) -> dict[str, float | list[float]]:
    """Return the metrics of a training log; an empty dict for a model without a slow path.

    slow_gate        |g| of each gate, the mean over channels
    slow_share       ‖g⊙ũ‖/‖x‖ at each gate on the tokens `ids` (B, T); omitted without `ids`
    slow_grad_norm   norm of the current gradient of the slow weights; omitted without gradients
    slow_grad_share  slow_grad_norm relative to the norm of the full gradient; invariant under clipping
    """
    path = next((module for module in model.modules() if isinstance(module, SlowPath)), None)
    if path is None:
        return {}
    gates: dict[str, Any] = dict(path.gates.items())
    metrics: dict[str, float | list[float]] = {
        "slow_gate": [_to_float(gate.value.abs().mean()) for gate in gates.values()]
    }
    if ids is not None:
        metrics["slow_share"] = _relative_norms(model, gates, ids, document_ids)
    slow = _gradients(path.blocks) + _gradients(path.phi)
    if slow:
        norm = _to_float(nn.utils.get_total_norm(slow))
        total = _to_float(nn.utils.get_total_norm(_gradients(model)))
        metrics["slow_grad_norm"] = norm
        metrics["slow_grad_share"] = norm / total if total else 0.0
    return metrics


def _relative_norms(
    model: nn.Module, gates: dict[str, Gate], ids: Tensor, document_ids: Tensor | None
) -> list[float]:
    """Return ‖g⊙ũ‖/‖x‖ at each gate, from one forward pass over `ids`."""
    shares: list[float] = []

    def record(gate: Gate, inputs: tuple[Tensor, Tensor]) -> None:
        x, slow_output = inputs
        shares.append(_to_float((gate.value * slow_output).norm() / x.norm()))

    hooks = [gate.register_forward_pre_hook(record) for gate in gates.values()]
    try:
        with eval_mode(model):
            model.forward(ids, document_ids=document_ids)  # a compiled __call__ would skip the hooks
    finally:
        for hook in hooks:
            hook.remove()
    return shares


def _gradients(module: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def _to_float(value: Any) -> float:
    return float(value.full_tensor() if hasattr(value, "full_tensor") else value)  # DTensor
