"""Where attention goes: measures of its weights per layer and head.

The weights are recomputed from each layer's captured input through the layer's own `reference`, so that the
model itself runs through the fused kernel, which never forms them.

With A the weights of a head, T × T, and σ their singular values, averaged over windows:

entropy         mean over queries of −Σ A_ts·log A_ts, in nats: 0 looks at one token, log T at all alike
sink mass       mean weight that queries after the first give to the first token
spectral gap    1 − σ₂/σ₁: 1 when all queries look at the same. Singular values, because causal weights are a
                triangular matrix, whose eigenvalues are its diagonal and say nothing of mixing
effective rank  exp of the entropy of σ/Σσ (Roy & Vetterli 2007)
max logit       the largest score before the softmax

Differential weights may be negative; for entropy and sink mass they are taken as absolute values, rows scaled
to sum to 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qkflow.attention import Attention
from qkflow.attention.couplings.base import StepSize
from qkflow.models import Decoder

MEASURES = ("entropy", "sink_mass", "spectral_gap", "effective_rank", "max_logit")


@dataclass
class LayerProbe:
    """Measures of one layer, each a value per head; `step_size` per head too, where the coupling has one."""

    entropy: list[float]
    sink_mass: list[float]
    spectral_gap: list[float]
    effective_rank: list[float]
    max_logit: list[float]
    step_size: list[float] | None = None
    weights: Tensor | None = field(default=None, repr=False)  # (heads, T, T) of the first window

    def to_dict(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in MEASURES}
        return found | ({} if self.step_size is None else {"step_size": self.step_size})


@torch.no_grad()
def probe_attention(model: Decoder, ids: Tensor, *, keep_weights: bool = False) -> list[LayerProbe]:
    """Measure every layer of a model on windows of token ids (B, T)."""
    training = model.training
    model.eval()
    try:
        with capture_attention_inputs(
            model.blocks
        ) as inputs:  # a slow path's layers have tokens of another kind
            model.forward(ids)  # not model(…): what is compiled calls no hooks
        return [_probe_layer(layer, x, keep_weights) for layer, x in inputs.items()]
    finally:
        model.train(training)


def summarize_probe(layers: list[LayerProbe]) -> dict[str, list[float]]:
    """The mean over heads of every measure, a value per layer; of max logit, the largest."""
    rows: dict[str, list[float]] = {
        f"attention_{name}" if name == "entropy" else name: [_mean(getattr(layer, name)) for layer in layers]
        for name in MEASURES
    }
    rows["max_logit"] = [max(layer.max_logit) for layer in layers]
    steps = [layer.step_size for layer in layers if layer.step_size is not None]
    return rows | ({"step_size": [_mean(step) for step in steps]} if steps else {})


@contextmanager
def capture_attention_inputs(model: nn.Module) -> Iterator[dict[Attention, Tensor]]:
    """The input of every attention layer, filled in as the model runs."""
    inputs: dict[Attention, Tensor] = {}

    def capture(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(layer, Attention)
        inputs[layer] = arguments[0]

    hooks = [m.register_forward_pre_hook(capture) for m in model.modules() if isinstance(m, Attention)]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def _probe_layer(layer: Attention, x: Tensor, keep_weights: bool) -> LayerProbe:
    _, weights = layer.reference(x)
    weights = weights.float()
    share = weights.abs()
    share = share / share.sum(dim=-1, keepdim=True)
    entropy = torch.special.entr(share).sum(dim=-1).mean(dim=-1)  # (B, H)
    sink = share[..., 1:, 0].mean(dim=-1) if share.shape[-2] > 1 else share[..., 0].mean(dim=-1)
    sigma = torch.linalg.svdvals(weights)
    gap = 1 - sigma[..., 1] / sigma[..., 0] if sigma.shape[-1] > 1 else torch.ones_like(entropy)
    rank = torch.special.entr(sigma / sigma.sum(dim=-1, keepdim=True)).sum(dim=-1).exp()
    step = next((m for m in layer.coupling.modules() if isinstance(m, StepSize)), None)
    return LayerProbe(
        entropy=entropy.mean(dim=0).tolist(),
        sink_mass=sink.mean(dim=0).tolist(),
        spectral_gap=gap.mean(dim=0).tolist(),
        effective_rank=rank.mean(dim=0).tolist(),
        max_logit=_max_logits(layer, x),
        step_size=None if step is None else step.per_head().tolist(),
        weights=weights[0].cpu() if keep_weights else None,
    )


def _max_logits(layer: Attention, x: Tensor) -> list[float]:
    """The largest score of each query head (differential scoring has two for every head it writes)."""
    q, k, _ = layer.project_qkv(x, None, None, None, None, None, use_reference=True)
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * layer.scale
    visible = layer.make_mask(x.shape[1], x.shape[1], device=x.device).to_bool(
        x.shape[1], x.shape[1], x.device
    )
    largest: list[float] = scores.masked_fill(~visible, float("-inf")).amax(dim=(0, 2, 3)).tolist()
    return largest


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
