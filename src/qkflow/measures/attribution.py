"""Token attribution of a classifier: attention, attention rollout, integrated gradients, or random scores.

Every method returns scores (B, T) of a padded batch. Attention weights are (B, H, T, T) per layer, with
queries as rows. `readout_positions` (B,) are the positions whose output the class is computed from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from qkflow.errors import InputError


class Classifier(Protocol):
    """Interface of a model to explain. `attention_mask` is True at tokens; padding is on the right."""

    def probabilities(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return class probabilities (B, n_classes) of a padded batch (B, T)."""

    def probabilities_and_attentions(
        self, ids: Tensor, attention_mask: Tensor
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Return `probabilities` and the attention weights (B, H, T, T) of each layer.

        The last layer may return only the row of the readout position, (B, H, 1, T).
        """

    def readout_positions(self, attention_mask: Tensor) -> Tensor:
        """Return the position (B,) whose output the class is computed from."""


class EmbeddingClassifier(Classifier, Protocol):
    """Interface for integrated gradients."""

    def embed(self, ids: Tensor) -> Tensor:
        """Return token embeddings (B, T, C)."""

    def probabilities_from_embeddings(self, inputs_embeds: Tensor, attention_mask: Tensor) -> Tensor:
        """Return class probabilities (B, n_classes) from token embeddings (B, T, C)."""


def mean_attention(attentions: Sequence[Tensor], readout_positions: Tensor) -> Tensor:
    """Return the attention row of the readout position, averaged over heads and layers."""
    return torch.stack([_select_query_row(layer.mean(1), readout_positions) for layer in attentions]).mean(0)


def max_attention(attentions: Sequence[Tensor], readout_positions: Tensor) -> Tensor:
    """Return the attention row of the readout position: mean over heads, maximum over layers."""
    return torch.stack([_select_query_row(layer.mean(1), readout_positions) for layer in attentions]).amax(0)


def attention_rollout(
    attentions: Sequence[Tensor], readout_positions: Tensor, residual: float = 0.5
) -> Tensor:
    """Return attention rollout (Abnar & Zuidema 2020) of the readout position.

    Rollout is the product over layers of residual·I + (1 − residual)·A, A averaged over heads. Only the
    readout row is computed, from the last layer to the first.
    """
    rollout = torch.nn.functional.one_hot(readout_positions, attentions[0].shape[-1]).to(attentions[0].dtype)
    for layer in reversed(attentions):
        weights = layer.mean(1)
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
        attended = weights[:, 0] if weights.shape[1] == 1 else torch.bmm(rollout[:, None], weights)[:, 0]
        rollout = residual * rollout + (1 - residual) * attended
    return rollout


def integrated_gradients(
    model: EmbeddingClassifier, ids: Tensor, attention_mask: Tensor, targets: Tensor, n_steps: int = 32
) -> Tensor:
    """Return integrated gradients (Sundararajan et al. 2017) of p(target); the baseline is a zero embedding.

    The path integral uses the midpoint rule. Completeness: the scores of a text sum to
    p(text) − p(baseline), up to the quadrature error.
    """
    with torch.no_grad():
        embeds = model.embed(ids)
    total = torch.zeros_like(embeds)
    for step in range(n_steps):
        point = (embeds * ((step + 0.5) / n_steps)).requires_grad_()
        with torch.enable_grad():
            probabilities = model.probabilities_from_embeddings(point, attention_mask)
            (grad,) = torch.autograd.grad(probabilities.gather(1, targets[:, None]).sum(), point)
        total += grad
    return (embeds * total / n_steps).sum(-1)


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
    """Return scores (B, T) of one of `ATTRIBUTION_METHODS`, −∞ at padding.

    `seeds` holds one seed per text, for the method `random`.
    """
    if method in ATTENTION_METHODS:
        scores = ATTENTION_METHODS[method](attentions, model.readout_positions(attention_mask))
    elif method == "gradient":
        if not (hasattr(model, "embed") and hasattr(model, "probabilities_from_embeddings")):
            raise InputError(
                "the attribution method 'gradient' needs a model with embed() and "
                "probabilities_from_embeddings()",
                code="model-without-embeddings",
            )
        scores = integrated_gradients(cast(EmbeddingClassifier, model), ids, attention_mask, targets)
    else:
        rows = [np.random.default_rng(seed).random(ids.shape[1]) for seed in seeds]
        scores = torch.from_numpy(np.stack(rows)).to(ids.device)
    return scores.masked_fill(~attention_mask, -torch.inf)
