"""Measures of attention weights per layer and head.

The weights are recomputed from the captured input of each layer through `Attention.reference`, because the
fused kernel of the forward pass never materializes them.

With A (T, T) the weights of a head and σ its singular values, averaged over windows:

entropy         mean over queries of −Σ_s A_ts·log A_ts in nats: 0 if one key has all weight, log T if uniform
sink mass       mean weight on the first token, over all later queries
spectral gap    1 − σ₂/σ₁; 1 if all rows are equal. Not eigenvalues: those of a causal A are its diagonal
effective rank  exp of the entropy of σ/Σσ (Roy & Vetterli 2007)
max logit       the largest score before the softmax

Differential weights may be negative: entropy and sink mass use their absolute values, with rows normalized.
A coupling's `diagnostics()`, such as the step size of `euler`, are reported beside the measures.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qkflow.attention import Attention
from qkflow.attention.attention import attention_layers
from qkflow.attention.inference import eval_mode
from qkflow.models import Decoder

MEASURES = ("entropy", "sink_mass", "spectral_gap", "effective_rank", "max_logit")


@dataclass
class LayerProbe:
    """Measures of one layer, a value per head each; max_logit and diagnostics a value per query head."""

    entropy: list[float]
    sink_mass: list[float]
    spectral_gap: list[float]
    effective_rank: list[float]
    max_logit: list[float]
    diagnostics: dict[str, list[float]] = field(default_factory=dict)
    weights: Tensor | None = field(default=None, repr=False)  # (H, T, T) of the first window

    def to_dict(self) -> dict[str, list[float]]:
        """Return measures and diagnostics by name; a diagnostic cannot replace a measure."""
        measures = {name: getattr(self, name) for name in MEASURES}
        return measures | self.diagnostics | measures

    def head_value(self, name: str, head: int) -> float:
        """Return a measure or diagnostic of one head; the maximum where the head has several query heads."""
        values = self.to_dict()[name]
        n_queries = len(values) // len(self.entropy)
        return max(values[head * n_queries : (head + 1) * n_queries])

    def _repr_png_(self) -> bytes | None:
        """Return the maps of all heads, which a notebook shows; None without weights."""
        from qkflow.measures.attention_maps import draw_png

        return None if self.weights is None else draw_png([self])


@torch.no_grad()
def probe_attention(model: Decoder, ids: Tensor, *, keep_weights: bool = False) -> list[LayerProbe]:
    """Measure every layer of the token-rate path on windows of token ids (B, T)."""
    with eval_mode(model):
        with capture_attention_inputs(model.blocks) as inputs:
            model.forward(ids)  # not model(ids): a compiled __call__ skips the hooks
        return [_probe_layer(layer, x, keep_weights) for layer, x in inputs.items()]


def summarize_probe(layers: list[LayerProbe]) -> dict[str, list[float]]:
    """Return a value per layer for every measure and diagnostic: the mean over heads, max_logit the max."""
    rows: dict[str, list[float]] = {}
    for layer in layers:
        for name, values in layer.to_dict().items():
            key = "attention_entropy" if name == "entropy" else name
            rows.setdefault(key, []).append(max(values) if name == "max_logit" else _mean(values))
    return rows


@contextmanager
def capture_attention_inputs(model: nn.Module) -> Iterator[dict[Attention, Tensor]]:
    """Capture the input (B, T, C) of every `Attention` in `model`, in the order of the forward pass."""
    inputs: dict[Attention, Tensor] = {}

    def capture(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(layer, Attention)
        inputs[layer] = arguments[0]

    hooks = [layer.register_forward_pre_hook(capture) for layer in attention_layers(model)]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def _probe_layer(layer: Attention, x: Tensor, keep_weights: bool) -> LayerProbe:
    _, weights = layer.reference(x)
    weights = weights.float()
    entropy, sink = entropy_and_sink_mass(weights)  # (B, H)
    sigma = torch.linalg.svdvals(weights)
    gap = 1 - sigma[..., 1] / sigma[..., 0] if sigma.shape[-1] > 1 else torch.ones_like(entropy)
    rank = torch.special.entr(sigma / sigma.sum(dim=-1, keepdim=True)).sum(dim=-1).exp()
    return LayerProbe(
        entropy=entropy.mean(dim=0).tolist(),
        sink_mass=sink.mean(dim=0).tolist(),
        spectral_gap=gap.mean(dim=0).tolist(),
        effective_rank=rank.mean(dim=0).tolist(),
        max_logit=_max_logits(layer, x),
        diagnostics={name: value.tolist() for name, value in layer.coupling.diagnostics().items()},
        weights=weights[0].cpu() if keep_weights else None,
    )


def entropy_and_sink_mass(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return both measures (…, H) of weights (…, H, T, T)."""
    share = weights
    if bool((weights < 0).any()):
        share = weights.abs()
        share = share / share.sum(dim=-1, keepdim=True)
    entropy = torch.special.entr(share).sum(dim=-1).mean(dim=-1)
    sink = share[..., 1:, 0].mean(dim=-1) if share.shape[-2] > 1 else share[..., 0].mean(dim=-1)
    return entropy, sink


def _max_logits(layer: Attention, x: Tensor) -> list[float]:
    """Return the largest visible score of each query head; differential scoring has two per output head."""
    q, k, _ = layer.project_qkv(x, use_reference=True)
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * layer.scale
    visible = layer.make_mask(x.shape[1], x.shape[1], device=x.device).to_bool(
        x.shape[1], x.shape[1], x.device
    )
    largest: list[float] = scores.masked_fill(~visible, float("-inf")).amax(dim=(0, 2, 3)).tolist()
    return largest


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
