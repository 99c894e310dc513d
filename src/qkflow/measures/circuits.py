"""Measures of the QK and OV circuits during training: scale, stable rank, effective pace, balance.

With W_QK,h = W_Q,hᵀ·W_K,h and W_OV,h = W_O,h·W_V,h the circuits of head h (or its one collapsed matrix):

scale           ‖W‖_F
largest         σ₁, the largest singular value
rank            the stable rank Σσ²/σ₁²
effective pace  (‖ΔQK‖/‖QK‖) / (‖ΔOV‖/‖OV‖), Δ the difference from the initial parameters of a circuit: the
                ratio at which the circuits did change, independent of the learning rates
symmetry        tr(A·A)/‖A‖² of A = Σ_h W_QK,h: 1 if A is symmetric, −1 if antisymmetric, about 0 if random
                (the score of Saponati et al. 2025, arXiv 2502.10927)
directionality  (c − r)/(c + r), with c and r the sums of the norms of the columns and rows of A that exceed
                their mean by two standard deviations (same source)
balance         ‖Σ W_O,hᵀ·W_O,h − W_V·W_Vᵀ‖_F, summed over the heads that share a value head. Gradient flow of
                a factorized circuit conserves this matrix; weight decay, Adam and large steps do not
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qkflow.attention import Attention
from qkflow.attention.attention import attention_layers
from qkflow.attention.projections import CollapsedOV, CollapsedQK, FactorizedOV, FactorizedQK
from qkflow.measures.attention import capture_attention_inputs
from qkflow.models import Decoder


@dataclass(frozen=True)
class LayerCircuits:
    """Singular values (H, D) of each circuit of one layer, in descending order, and the balance of its OV."""

    qk: Tensor
    ov: Tensor
    balance: Tensor | None  # (value heads, D, D); None for a collapsed OV

    def frobenius_norms(self, circuit: str) -> Tensor:
        """Return ‖W‖_F (H,) of every head."""
        values: Tensor = getattr(self, circuit)
        return values.norm(dim=-1)


def attention_modules(model: nn.Module) -> list[Attention]:
    """Return the attention layers of the token-rate path, in order."""
    blocks = getattr(model, "blocks", None)
    root = blocks if isinstance(blocks, nn.ModuleList) else model
    return attention_layers(root)


@torch.no_grad()
def layer_circuits(layer: Attention) -> LayerCircuits:
    """Measure the circuits of one layer."""
    return LayerCircuits(_qk_singular_values(layer), _ov_singular_values(layer), _balance(layer))


def circuit_metrics(model: nn.Module) -> dict[str, list[float]]:
    """Return the metrics of a training log: a value per layer, the mean over heads."""
    circuits = [layer_circuits(layer) for layer in attention_modules(model)]
    rows: dict[str, list[float]] = {}
    for name in ("qk", "ov"):
        values = [getattr(layer, name).float() for layer in circuits]
        rows[f"{name}_scale"] = [float(sigma.norm(dim=-1).mean()) for sigma in values]
        rows[f"{name}_largest"] = [float(sigma[:, 0].mean()) for sigma in values]
        rows[f"{name}_rank"] = [float(_stable_rank(sigma).mean()) for sigma in values]
    products = [qk_product(layer) for layer in attention_modules(model)]
    rows["qk_symmetry"] = [symmetry_score(product) for product in products]
    rows["qk_directionality"] = [directionality_score(product) for product in products]
    balances = [layer.balance for layer in circuits if layer.balance is not None]
    if balances and len(balances) == len(circuits):
        rows["ov_balance"] = [float(matrix.float().flatten(1).norm(dim=-1).mean()) for matrix in balances]
    return rows


@torch.no_grad()
def qk_product(layer: Attention) -> Tensor:
    """Return A = Σ_h W_Q,hᵀ·W_K,h (C, C): the score of token x with token y is xᵀ·A·y before rotation."""
    circuit = layer.qk
    if isinstance(circuit, CollapsedQK):
        return circuit.weight.float().sum(dim=0)
    assert isinstance(circuit, FactorizedQK)
    return circuit.q.weight.float().mT @ circuit.repeat_key_rows(circuit.k.weight).float()


def symmetry_score(matrix: Tensor) -> float:
    """Return tr(A·A)/‖A‖²; 0 for a matrix of zeros."""
    size = float(matrix.square().sum())
    return float((matrix * matrix.mT).sum()) / size if size else 0.0


def directionality_score(matrix: Tensor, threshold: float = 2.0) -> float:
    """Return the balance of outlying columns (positive) and rows (negative); 0 without outliers."""

    def outlying(norms: Tensor) -> float:
        return float(norms[norms > norms.mean() + threshold * norms.std()].sum())

    columns, rows = outlying(matrix.norm(dim=0)), outlying(matrix.norm(dim=1))
    return (columns - rows) / (columns + rows) if columns + rows else 0.0


def _stable_rank(singular_values: Tensor) -> Tensor:
    square = singular_values.square()
    return square.sum(-1) / square[:, 0].clamp_min(torch.finfo(singular_values.dtype).tiny)


class CircuitTracker:
    """Change of the QK and OV parameters since construction."""

    def __init__(self, model: nn.Module) -> None:
        self._initial = {
            name: [p.detach().clone() for p in _circuit_parameters(model, name)] for name in ("qk", "ov")
        }

    @torch.no_grad()
    def metrics(self, model: nn.Module) -> dict[str, float]:
        """Return `qk_change`, `ov_change` and, if OV has changed, `effective_pace`."""
        change = {
            name: _relative_change(list(_circuit_parameters(model, name)), initial)
            for name, initial in self._initial.items()
        }
        metrics = {f"{name}_change": value for name, value in change.items()}
        return metrics | ({"effective_pace": change["qk"] / change["ov"]} if change["ov"] > 0 else {})


def _circuit_parameters(model: nn.Module, circuit: str) -> Iterator[nn.Parameter]:
    for layer in attention_modules(model):
        yield from getattr(layer, circuit).parameters()


def _relative_change(current: Sequence[Tensor], initial: Sequence[Tensor]) -> float:
    change = sum(float((a - b).float().square().sum()) for a, b in zip(current, initial, strict=True))
    size = sum(float(b.float().square().sum()) for b in initial)
    return (change / size) ** 0.5 if size else 0.0


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
    """Return W_O,hᵀ (heads, D, C) and W_V (value heads, D, C) with the same D.

    If output heads are wider than value heads (differential scoring), several value heads form one.
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
    """Return the D singular values of leftᵀ·right (…, C, C) for left, right (…, D, C), by two QRs."""
    left_r = torch.linalg.qr(left.mT.float(), mode="r").R
    right_r = torch.linalg.qr(right.mT.float(), mode="r").R
    return torch.linalg.svdvals(left_r @ right_r.mT)


@torch.no_grad()
def attention_mass(
    model: Decoder, ids: Tensor, token_mask: Tensor, attention_mask: Tensor | None = None
) -> list[Tensor]:
    """Return, per layer, the weight (B, H, T) of each query on the tokens of `token_mask` (B, T)."""
    with capture_attention_inputs(model.blocks) as inputs:
        model.forward(ids, attention_mask=attention_mask)
    return [
        (layer.reference(x, attention_mask=attention_mask)[1] * token_mask[:, None, None]).sum(-1)
        for layer, x in inputs.items()
    ]
