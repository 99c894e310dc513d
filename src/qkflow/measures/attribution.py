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

    def probabilities(self, ids: Tensor, mask: Tensor) -> Tensor:
        """(B, classes) for a padded batch (B, T)."""

    def attend(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """The same, and the attention weights of each layer, (B, H, T, T).

        The last layer may give the row of the read position alone, (B, H, 1, T): no ranking needs another.
        """

    def read(self, mask: Tensor) -> Tensor:
        """The position (B,) whose output the class is read from."""


class Embedding(Classifier, Protocol):
    """What the gradient ranking asks for besides."""

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings (B, T, D)."""

    def probabilities_of(self, embedded: Tensor, mask: Tensor) -> Tensor:
        """(B, classes) from token embeddings."""


def attention_row(layers: Sequence[Tensor], read: Tensor) -> Tensor:
    """Attention of the read position, averaged over heads and layers."""
    return torch.stack([_row(layer.mean(1), read) for layer in layers]).mean(0)


def max_pool(layers: Sequence[Tensor], read: Tensor) -> Tensor:
    """Attention of the read position, averaged over heads, the largest of all layers."""
    return torch.stack([_row(layer.mean(1), read) for layer in layers]).amax(0)


def rollout(layers: Sequence[Tensor], read: Tensor, residual: float = 0.5) -> Tensor:
    """Attention rollout (Abnar & Zuidema 2020) of the read position.

    Each layer passes residual·I + (1 − residual)·A on, A averaged over heads; the product over layers is
    followed for one row only, from the last layer down.
    """
    flow = torch.nn.functional.one_hot(read, layers[0].shape[-1]).to(layers[0].dtype)
    for layer in reversed(layers):
        mixing = layer.mean(1)
        mixing = mixing / mixing.sum(-1, keepdim=True).clamp_min(torch.finfo(mixing.dtype).tiny)
        passed = mixing[:, 0] if mixing.shape[1] == 1 else torch.bmm(flow[:, None], mixing)[:, 0]
        flow = residual * flow + (1 - residual) * passed
    return flow


def integrated_gradients(
    model: Embedding, ids: Tensor, mask: Tensor, chosen: Tensor, steps: int = 32
) -> Tensor:
    """Integrated gradients (Sundararajan et al. 2017) of the chosen class, from the zero embedding.

    The path integral by the midpoint rule; the scores of a text sum to p(text) − p(zero), up to its error.
    """
    with torch.no_grad():
        embedded = model.embed(ids)
    total = torch.zeros_like(embedded)
    for step in range(steps):
        point = (embedded * ((step + 0.5) / steps)).requires_grad_()
        with torch.enable_grad():
            picked = model.probabilities_of(point, mask).gather(1, chosen[:, None]).sum()
            (gradient,) = torch.autograd.grad(picked, point)
        total += gradient
    return (embedded * total / steps).sum(-1)


def _row(weights: Tensor, read: Tensor) -> Tensor:
    if weights.shape[1] == 1:
        return weights[:, 0]
    return weights.gather(1, read[:, None, None].expand(-1, 1, weights.shape[-1]))[:, 0]


FROM_ATTENTION: dict[str, Callable[[Sequence[Tensor], Tensor], Tensor]] = {
    "attention": attention_row,
    "max": max_pool,
    "rollout": rollout,
}
SOURCES = (*FROM_ATTENTION, "gradient", "random")


def scores(
    model: Classifier,
    source: str,
    ids: Tensor,
    mask: Tensor,
    layers: Sequence[Tensor],
    chosen: Tensor,
    seeds: Sequence[tuple[int, int]],
) -> Tensor:
    """Scores (B, T) from one of `SOURCES`, −∞ at padding; `seeds` tell the random ranking its texts apart."""
    if source in FROM_ATTENTION:
        found = FROM_ATTENTION[source](layers, model.read(mask))
    elif source == "gradient":
        if not hasattr(model, "embed") or not hasattr(model, "probabilities_of"):
            raise InputError("the gradient ranking needs a model with embed() and probabilities_of()")
        found = integrated_gradients(cast(Embedding, model), ids, mask, chosen)
    else:
        rows = [np.random.default_rng(seed).random(ids.shape[1]) for seed in seeds]
        found = torch.from_numpy(np.stack(rows)).to(ids.device)
    return found.masked_fill(~mask, -torch.inf)
