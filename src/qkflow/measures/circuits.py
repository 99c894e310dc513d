"""What the two circuits of attention are doing while they learn: their size, their pace, their balance.

With W_QK,h = W_Q,hᵀ·W_K,h and W_OV,h = W_O,h·W_V,h the circuits of head h (or its one collapsed matrix):

scale      ‖W‖_F of a circuit, and its largest singular value
rank       Σσ²/σ₁², the stable rank: how many directions carry the circuit
pace       (‖ΔQK‖/‖QK‖) / (‖ΔOV‖/‖OV‖), Δ the way from the start, over all parameters of each circuit: the
           ratio at which the two have really learnt, whatever learning rates they were given
balance    ‖Σ W_O,hᵀ·W_O,h − W_V·W_Vᵀ‖_F, the sum over the heads that share a value head. Gradient flow of a
           factorised circuit conserves this matrix; weight decay, Adam and large steps do not
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qkflow.attention import Attention
from qkflow.attention.projections import CollapsedOV, CollapsedQK, FactorisedOV, FactorisedQK
from qkflow.measures.attention import captured
from qkflow.models import Decoder


@dataclass(frozen=True)
class LayerCircuits:
    """Singular values (heads, rank), largest first, of each circuit of one layer; the balance of its OV."""

    qk: Tensor
    ov: Tensor
    balance: Tensor | None  # (value heads, D, D); None where OV is collapsed

    def scales(self, circuit: str) -> Tensor:
        """‖W‖_F of every head."""
        values: Tensor = getattr(self, circuit)
        return values.norm(dim=-1)


def layers_of(model: nn.Module) -> list[Attention]:
    """The attention layers of a model's main path, in order."""
    blocks = getattr(model, "blocks", None)
    inside = blocks if isinstance(blocks, nn.ModuleList) else model
    return [module for module in inside.modules() if isinstance(module, Attention)]


@torch.no_grad()
def circuits(layer: Attention) -> LayerCircuits:
    """Measure one layer, head by head."""
    return LayerCircuits(_qk(layer), _ov(layer), _balance(layer))


def circuit_measures(model: nn.Module) -> dict[str, list[float]]:
    """What a training run logs: a value per layer, the mean over its heads."""
    found = [circuits(layer) for layer in layers_of(model)]
    rows: dict[str, list[float]] = {}
    for name in ("qk", "ov"):
        values = [getattr(layer, name).float() for layer in found]
        rows[f"{name}_scale"] = [float(each.norm(dim=-1).mean()) for each in values]
        rows[f"{name}_largest"] = [float(each[:, 0].mean()) for each in values]
        rows[f"{name}_rank"] = [float(_stable_rank(each).mean()) for each in values]
    kept = [layer.balance for layer in found if layer.balance is not None]
    if kept and len(kept) == len(found):
        rows["ov_balance"] = [float(each.float().flatten(1).norm(dim=-1).mean()) for each in kept]
    return rows


def _stable_rank(values: Tensor) -> Tensor:
    square = values.square()
    return square.sum(-1) / square[:, 0].clamp_min(torch.finfo(values.dtype).tiny)


class CircuitWatch:
    """Remembers where the circuits' parameters started, to tell how far each of them has moved."""

    def __init__(self, model: nn.Module) -> None:
        self._start = {name: [p.detach().clone() for p in _parameters(model, name)] for name in ("qk", "ov")}

    @torch.no_grad()
    def look(self, model: nn.Module) -> dict[str, float]:
        """`qk_change`, `ov_change` and, once OV has moved, `effective_pace`."""
        moved = {name: _relative(list(_parameters(model, name)), then) for name, then in self._start.items()}
        found = {f"{name}_change": value for name, value in moved.items()}
        return found | ({"effective_pace": moved["qk"] / moved["ov"]} if moved["ov"] > 0 else {})


def _parameters(model: nn.Module, circuit: str) -> Iterator[nn.Parameter]:
    for layer in layers_of(model):
        yield from getattr(layer, circuit).parameters()


def _relative(now: Sequence[Tensor], before: Sequence[Tensor]) -> float:
    moved = sum(float((a - b).float().square().sum()) for a, b in zip(now, before, strict=True))
    size = sum(float(b.float().square().sum()) for b in before)
    return (moved / size) ** 0.5 if size else 0.0


def _qk(layer: Attention) -> Tensor:
    circuit, heads = layer.qk, layer.heads
    if isinstance(circuit, CollapsedQK):
        return torch.linalg.svdvals(circuit.weight.float())
    assert isinstance(circuit, FactorisedQK)
    queries = circuit.q.weight.unflatten(0, (heads.queries, heads.size))
    keys = circuit.keys_for_queries(circuit.k.weight).unflatten(0, (heads.queries, heads.size))
    return _product_values(queries, keys)


def _ov(layer: Attention) -> Tensor:
    circuit = layer.ov
    if isinstance(circuit, CollapsedOV):
        return torch.linalg.svdvals(circuit.weight.float())
    outputs, values = _output_heads(layer)
    return _product_values(outputs, values.repeat_interleave(outputs.shape[0] // values.shape[0], dim=0))


def _output_heads(layer: Attention) -> tuple[Tensor, Tensor]:
    """W_O,hᵀ (heads, D, width) and W_V (value heads, D, width), cut alike.

    Scorings that write wider heads than a value head has (differential) join several values into one.
    """
    circuit, heads = layer.ov, layer.heads
    assert isinstance(circuit, FactorisedOV)
    size = max(heads.value_size, heads.output_size)
    outputs = circuit.o.weight.mT.unflatten(0, (-1, size))
    return outputs, circuit.v.weight.unflatten(0, (-1, size))


def _balance(layer: Attention) -> Tensor | None:
    if not isinstance(layer.ov, FactorisedOV):
        return None
    outputs, values = _output_heads(layer)
    shared = (outputs @ outputs.mT).unflatten(0, (values.shape[0], -1)).sum(dim=1)
    return shared - values @ values.mT


def _product_values(left: Tensor, right: Tensor) -> Tensor:
    """Singular values of leftᵀ·right (…, width, width) for left, right (…, D, width), in the small space."""
    left_r = torch.linalg.qr(left.mT.float(), mode="r").R
    right_r = torch.linalg.qr(right.mT.float(), mode="r").R
    return torch.linalg.svdvals(left_r @ right_r.mT)


@torch.no_grad()
def attention_mass(
    model: Decoder, ids: Tensor, chosen: Tensor, padding: Tensor | None = None
) -> list[Tensor]:
    """Per layer, the weight that each query gives to the chosen tokens, (B, heads, T).

    `chosen` (B, T) is True at the tokens asked about, `padding` (B, T) at real tokens.
    """
    with captured(model.blocks) as inputs:
        model.forward(ids, padding=padding)
    return [
        (layer.reference(x, padding=padding)[1] * chosen[:, None, None]).sum(-1)
        for layer, x in inputs.items()
    ]
