"""Induction and copying, on random sequences that are repeated once.

A sequence of L random tokens is followed by itself, so in the second half every token has been seen before.
An induction head (Olsson et al. 2022, arXiv 2209.11895) attends from a token to the one that followed its
first occurrence.

induction        weight from token L + i to token i + 1, the mean over i
previous token   weight from a token to the one before it
copy gain        loss on the first half minus loss on the second, in nats per token: what repetition saves
"""

from __future__ import annotations

import torch
from torch import Tensor

from qkflow.attention.inference import eval_mode
from qkflow.measures.attention import capture_attention_inputs
from qkflow.models import Decoder

SEQUENCES, HALF_LENGTH = 2, 64
_SEED = 0  # every model is measured on the same tokens


def repeated_sequences(vocab_size: int, sequences: int = SEQUENCES, half_length: int = HALF_LENGTH) -> Tensor:
    """Return random token ids (sequences, 2·half_length) whose halves are equal."""
    generator = torch.Generator().manual_seed(_SEED)
    half = torch.randint(vocab_size, (sequences, half_length), generator=generator)
    return torch.cat((half, half), dim=1)


def induction_score(weights: Tensor, ids: Tensor) -> Tensor:
    """Return the induction score (…, H) of weights (…, H, T, T) on any text of token ids (T,).

    The weight from a token to those that followed its earlier occurrences, the mean over tokens that have
    one; NaN if no token occurs twice. On distinct tokens that are repeated this is `induction`.
    """
    targets = torch.zeros(len(ids), len(ids), dtype=torch.bool, device=ids.device)
    targets[:, 1:] = (ids[:, None] == ids)[:, :-1].tril(-2)  # s + 1 for an earlier s with the same token
    repeated = targets.any(dim=-1)
    return (weights[..., repeated, :] * targets[repeated]).sum(dim=-1).mean(dim=-1)


def previous_token_score(weights: Tensor) -> Tensor:
    """Return the mean weight (…, H) from a token to the one before it, of weights (…, H, T, T)."""
    return weights.diagonal(-1, dim1=-2, dim2=-1).mean(dim=-1)


@torch.no_grad()
def head_scores(model: Decoder, ids: Tensor) -> dict[str, list[list[float]]]:
    """Return `induction` and `previous_token` of every head, by layer, on repeated sequences (B, 2L)."""
    half = ids.shape[1] // 2
    scores: dict[str, list[list[float]]] = {"induction": [], "previous_token": []}
    with eval_mode(model):
        with capture_attention_inputs(model.blocks) as inputs:
            model.forward(ids)
        for layer, x in inputs.items():
            weights = layer.reference(x)[1].float().mean(dim=0)  # (H, T, T)
            after_first = weights.diagonal(1 - half, dim1=-2, dim2=-1)[..., 1:]  # (L + i, i + 1) from i = 1
            scores["induction"].append(after_first.mean(dim=-1).tolist())
            scores["previous_token"].append(previous_token_score(weights).tolist())
    return scores


@torch.no_grad()
def copy_gain(model: Decoder, ids: Tensor) -> float:
    """Return the mean loss on the first half of repeated sequences (B, 2L) minus that on the second."""
    half = ids.shape[1] // 2
    with eval_mode(model):
        hidden = model.forward(ids)
        first = model.loss(hidden[:, : half - 1], ids[:, 1:half])
        second = model.loss(hidden[:, half - 1 : -1], ids[:, half:])
    return float(first - second)


def induction_metrics(model: Decoder) -> dict[str, list[float] | float]:
    """Return the metrics of a training log: the strongest head of every layer, and the copy gain."""
    ids = repeated_sequences(model.config.vocab_size).to(model.embedding.weight.device)
    scores = head_scores(model, ids)
    strongest: dict[str, list[float] | float] = {
        f"{name}_score": [max(heads) for heads in layers] for name, layers in scores.items()
    }
    return strongest | {"copy_gain": copy_gain(model, ids)}
