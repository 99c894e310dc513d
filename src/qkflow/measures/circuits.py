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
from qkflow.attention.projections import CollapsedOV, CollapsedQK, FactorizedOV, FactorizedQK
from qkflow.measures.attention import capture_attention_inputs
from qkflow.models import Decoder


@dataclass(frozen=True)
class LayerCircuits:
    """Singular values (heads, rank), largest first, of each circuit of one layer; the balance of its OV."""

    qk: Tensor
    ov: Tensor
    balance: Tensor | None  # (value heads, D, D); None where OV is collapsed

    def frobenius_norms(self, circuit: str) -> Tensor:
        """‖W‖_F of every head."""
        values: Tensor = getattr(self, circuit)
        return values.norm(dim=-1)


def attention_modules(model: nn.Module) -> list[Attention]:
    """The attention layers of a model's main path, in order."""
    blocks = getattr(model, "blocks", None)
    inside = blocks if isinstance(blocks, nn.ModuleList) else model
    return [module for module in inside.modules() if isinstance(module, Attention)]


@torch.no_grad()
def layer_circuits(layer: Attention) -> LayerCircuits:
    """Measure one layer, head by head."""
    return LayerCircuits(_qk_singular_values(layer), _ov_singular_values(layer), _balance(layer))


def circuit_metrics(model: nn.Module) -> dict[str, list[float]]:
    """What a training run logs: a value per layer, the mean over its heads."""
    found = [layer_circuits(layer) for layer in attention_modules(model)]
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


def _stable_rank(singular_values: Tensor) -> Tensor:
    square = singular_values.square()
    return square.sum(-1) / square[:, 0].clamp_min(torch.finfo(singular_values.dtype).tiny)


class CircuitTracker:
    """Remembers where the circuits' parameters started, to tell how far each of them has moved."""

    def __init__(self, model: nn.Module) -> None:
        self._initial = {
            name: [p.detach().clone() for p in _circuit_parameters(model, name)] for name in ("qk", "ov")
        }

    @torch.no_grad()
    def metrics(self, model: nn.Module) -> dict[str, float]:
        """`qk_change`, `ov_change` and, once OV has moved, `effective_pace`."""
        moved = {
            name: _relative_change(list(_circuit_parameters(model, name)), then)
            for name, then in self._initial.items()
        }
        found = {f"{name}_change": value for name, value in moved.items()}
        return found | ({"effective_pace": moved["qk"] / moved["ov"]} if moved["ov"] > 0 else {})


def _circuit_parameters(model: nn.Module, circuit: str) -> Iterator[nn.Parameter]:
    for layer in attention_modules(model):
        yield from getattr(layer, circuit).parameters()


def _relative_change(current: Sequence[Tensor], initial: Sequence[Tensor]) -> float:
    moved = sum(float((a - b).float().square().sum()) for a, b in zip(current, initial, strict=True))
    size = sum(float(b.float().square().sum()) for b in initial)
    return (moved / size) ** 0.5 if size else 0.0


def _qk_singular_values(layer: Attention) -> Tensor:
    circuit, heads = layer.qk, layer.head_shapes
    if isinstance(circuit, CollapsedQK):
        return torch.linalg.svdvals(circuit.weight.float())
    assert isinstance(circuit, FactorizedQK)
    queries = circuit.q.weight.unflatten(0, (heads.n_q, heads.head_dim))
    keys = circuit.repeat_key_rows(circuit.k.weight).unflatten(0, (heads.n_q, heads.head_dim))
    return _product_singular_values(queries, keys)


def _ov_singular_values(layer: Attention) -> Tensor:
    circuit = layer.ov
    if isinstance(circuit, CollapsedOV):
        return torch.linalg.svdvals(circuit.weight.float())
    outputs, values = _ov_head_weights(layer)
    return _product_singular_values(
        outputs, values.repeat_interleave(outputs.shape[0] // values.shape[0], dim=0)
    )


def _ov_head_weights(layer: Attention) -> tuple[Tensor, Tensor]:
    """W_O,hᵀ (heads, D, width) and W_V (value heads, D, width), cut alike.

    Scorings that write wider heads than a value head has (differential) join several values into one.
    """
    circuit, heads = layer.ov, layer.head_shapes
    assert isinstance(circuit, FactorizedOV)
    size = max(heads.v_head_dim, heads.out_head_dim)
    outputs = circuit.o.weight.mT.unflatten(0, (-1, size))
    return outputs, circuit.v.weight.unflatten(0, (-1, size))


def _balance(layer: Attention) -> Tensor | None:
    if not isinstance(layer.ov, FactorizedOV):
        return None
    outputs, values = _ov_head_weights(layer)
    shared = (outputs @ outputs.mT).unflatten(0, (values.shape[0], -1)).sum(dim=1)
    return shared - values @ values.mT


def _product_singular_values(left: Tensor, right: Tensor) -> Tensor:
    """Singular values of leftᵀ·right (…, width, width) for left, right (…, D, width), in the small space."""
    left_r = torch.linalg.qr(left.mT.float(), mode="r").R
    right_r = torch.linalg.qr(right.mT.float(), mode="r").R
    return torch.linalg.svdvals(left_r @ right_r.mT)


@torch.no_grad()
def attention_mass(
    model: Decoder, ids: Tensor, token_mask: Tensor, attention_mask: Tensor | None = None
) -> list[Tensor]:
    """Per layer, the weight that each query gives to the chosen tokens, (B, heads, T).

    `chosen` (B, T) is True at the tokens asked about, `padding` (B, T) at real tokens.
    """
    with capture_attention_inputs(model.blocks) as inputs:
        model.forward(ids, attention_mask=attention_mask)
    return [
        (layer.reference(x, attention_mask=attention_mask)[1] * token_mask[:, None, None]).sum(-1)
        for layer, x in inputs.items()
    ]
