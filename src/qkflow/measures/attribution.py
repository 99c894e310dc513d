"""Which tokens a classifier's decision rests on, according to its attention, its gradients, or chance.

A ranking scores every token of a padded batch, (B, T). Attention is (B, H, T, T) per layer, rows being
queries; `read` is the position (B,) whose output the class is read from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from qkflow.errors import InputError


class Classifier(Protocol):
    """All that the measures ask of a model. `mask` is True at real tokens; padding stands at the end."""

    def probabilities(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, classes) for a padded batch (B, T)."""

    def probabilities_and_attentions(
        self, ids: Tensor, attention_mask: Tensor
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """The same, and the attention weights of each layer, (B, H, T, T).

        The last layer may give the row of the read position alone, (B, H, 1, T): no ranking needs another.
        """

    def readout_positions(self, attention_mask: Tensor) -> Tensor:
        """The position (B,) whose output the class is read from."""


class EmbeddingClassifier(Classifier, Protocol):
    """What the gradient ranking asks for besides."""

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings (B, T, D)."""

    def probabilities_from_embeddings(self, inputs_embeds: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, classes) from token embeddings."""


def mean_attention(attentions: Sequence[Tensor], readout_positions: Tensor) -> Tensor:
    """Attention of the read position, averaged over heads and layers."""
    return torch.stack([_select_query_row(layer.mean(1), readout_positions) for layer in attentions]).mean(0)


def max_attention(attentions: Sequence[Tensor], readout_positions: Tensor) -> Tensor:
    """Attention of the read position, averaged over heads, the largest of all layers."""
    return torch.stack([_select_query_row(layer.mean(1), readout_positions) for layer in attentions]).amax(0)


def attention_rollout(
    attentions: Sequence[Tensor], readout_positions: Tensor, residual: float = 0.5
) -> Tensor:
    """Attention rollout (Abnar & Zuidema 2020) of the read position.

    Each layer passes residual·I + (1 − residual)·A on, A averaged over heads; the product over layers is
    followed for one row only, from the last layer down.
    """
    flow = torch.nn.functional.one_hot(readout_positions, attentions[0].shape[-1]).to(attentions[0].dtype)
    for layer in reversed(attentions):
        mixing = layer.mean(1)
        mixing = mixing / mixing.sum(-1, keepdim=True).clamp_min(torch.finfo(mixing.dtype).tiny)
        passed = mixing[:, 0] if mixing.shape[1] == 1 else torch.bmm(flow[:, None], mixing)[:, 0]
        flow = residual * flow + (1 - residual) * passed
    return flow


def integrated_gradients(
    model: EmbeddingClassifier, ids: Tensor, attention_mask: Tensor, targets: Tensor, n_steps: int = 32
) -> Tensor:
    """Integrated gradients (Sundararajan et al. 2017) of the chosen class, from the zero embedding.

    The path integral by the midpoint rule; the scores of a text sum to p(text) − p(zero), up to its error.
    """
    with torch.no_grad():
        embedded = model.embed(ids)
    total = torch.zeros_like(embedded)
    for step in range(n_steps):
        point = (embedded * ((step + 0.5) / n_steps)).requires_grad_()
        with torch.enable_grad():
            picked = (
                model.probabilities_from_embeddings(point, attention_mask).gather(1, targets[:, None]).sum()
            )
            (gradient,) = torch.autograd.grad(picked, point)
        total += gradient
    return (embedded * total / n_steps).sum(-1)


def _select_query_row(weights: Tensor, readout_positions: Tensor) -> Tensor:
    if weights.shape[1] == 1:
        return weights[:, 0]
    return weights.gather(1, readout_positions[:, None, None].expand(-1, 1, weights.shape[-1]))[:, 0]


ATTENTION_METHODS: dict[str, Callable[[Sequence[Tensor], Tensor], Tensor]] = {
    "attention": mean_attention,
    "max": max_attention,
    "rollout": attention_rollout,
}
ATTRIBUTION_METHODS = (*ATTENTION_METHODS, "gradient", "random")


def attribution_scores(
    model: Classifier,
    method: str,
    ids: Tensor,
    attention_mask: Tensor,
    attentions: Sequence[Tensor],
    targets: Tensor,
    seeds: Sequence[tuple[int, int]],
) -> Tensor:
    """Scores (B, T) from one of `SOURCES`, −∞ at padding; `seeds` tell the random ranking its texts apart."""
    if method in ATTENTION_METHODS:
        found = ATTENTION_METHODS[method](attentions, model.readout_positions(attention_mask))
    elif method == "gradient":
        if not hasattr(model, "embed") or not hasattr(model, "probabilities_from_embeddings"):
            raise InputError("the gradient ranking needs a model with embed() and probabilities_from_embeddings()")
        found = integrated_gradients(cast(EmbeddingClassifier, model), ids, attention_mask, targets)
    else:
        rows = [np.random.default_rng(seed).random(ids.shape[1]) for seed in seeds]
        found = torch.from_numpy(np.stack(rows)).to(ids.device)
    return found.masked_fill(~attention_mask, -torch.inf)
