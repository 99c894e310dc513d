"""Does the gate open, and what does the slow path say through it?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qkflow.timescale.gate import Gate
from qkflow.timescale.slow_path import SlowPath


@torch.no_grad()
def slow_measures(
    model: nn.Module, ids: Tensor | None = None, documents: Tensor | None = None
) -> dict[str, float]:
    """Numbers of the slow path of `model`; an empty dict where there is none.

    slow/gate        mean |g| over channels and gates; with several gates also slow/gate.<fast layer>
    slow/share       ‖g⊙ũ‖/‖x‖ where the slow path enters, mean over gates, on the tokens `ids` (B, T); with
                     several gates also slow/share.<fast layer>; left out without `ids`
    slow/grad_norm   norm of the gradient of the slow weights, and slow/gate_grad_norm of the gates; left out
                     before a backward pass. Call it before gradients are clipped.
    """
    path = next((module for module in model.modules() if isinstance(module, SlowPath)), None)
    if path is None:
        return {}
    gates: dict[str, Any] = dict(path.gates.items())
    found = _averaged("slow/gate", {layer: float(gate.value.abs().mean()) for layer, gate in gates.items()})
    if ids is not None:
        found |= _averaged("slow/share", _shares(model, gates, ids, documents))
    for name, parts in (("slow/grad_norm", [path.blocks, path.phi]), ("slow/gate_grad_norm", [path.gates])):
        grads = [p.grad for part in parts for p in part.parameters() if p.grad is not None]
        if grads:
            found[name] = _norm(grads)
    return found


def _shares(
    model: nn.Module, gates: dict[str, Gate], ids: Tensor, documents: Tensor | None
) -> dict[str, float]:
    """‖g⊙ũ‖/‖x‖ at each gate, in one pass over `ids`."""
    shares: dict[str, float] = {}

    def listen(layer: str) -> Any:
        def hook(gate: Gate, inputs: tuple[Tensor, Tensor], out: Tensor) -> None:
            x, heard = inputs
            shares[layer] = float((gate.value * heard).norm() / x.norm())

        return hook

    hooks = [gate.register_forward_hook(listen(layer)) for layer, gate in gates.items()]
    training = model.training
    try:
        model.eval()
        model(ids, documents=documents)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return shares


def _averaged(name: str, per_layer: dict[str, float]) -> dict[str, float]:
    mean = {name: sum(per_layer.values()) / len(per_layer)}
    if len(per_layer) == 1:
        return mean
    return mean | {f"{name}.{layer}": value for layer, value in per_layer.items()}


def _norm(grads: list[Tensor]) -> float:
    total: Any = nn.utils.get_total_norm(grads)
    return float(total.full_tensor() if hasattr(total, "full_tensor") else total)  # of sharded gradients
