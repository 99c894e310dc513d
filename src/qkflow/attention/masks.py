"""Attention masks: causal, window, padding and packed documents."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qkflow.errors import InputError


@dataclass(frozen=True)
class Mask:
    """Causal or explicit attention mask. With `causal` alone the fused kernel skips future keys."""

    causal: bool = False
    allowed: Tensor | None = None  # (…, T, S), True: may attend; broadcasts to (B, 1, T, S)

    def to_bool(self, n_queries: int, n_keys: int, device: torch.device) -> Tensor:
        """Return the mask as one boolean matrix, for reference implementations."""
        if self.allowed is not None:
            return self.allowed
        allowed = torch.ones(n_queries, n_keys, dtype=torch.bool, device=device)
        return allowed.tril(n_keys - n_queries) if self.causal else allowed


def build_mask(
    n_queries: int,
    n_keys: int,
    *,
    causal: bool,
    window: int | None = None,
    attention_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    device: torch.device | None = None,
    batch_size: int | None = None,
) -> Mask:
    """Combine causal, window, padding and document masks.

    The queries are the last `n_queries` of the `n_keys` tokens. `attention_mask` (B, S) is True at real
    tokens, `document_ids` (B, S) is the document of each token; both cover all keys.
    """
    for name, tensor in (("attention_mask", attention_mask), ("document_ids", document_ids)):
        if tensor is None:
            continue
        _check_2d(name, tensor)
        if tensor.shape[1] != n_keys:
            raise InputError(f"{name} has {tensor.shape[1]} tokens, expected {n_keys}", code="mask-length")
        if batch_size is not None and tensor.shape[0] not in (1, batch_size):
            raise InputError(
                f"{name} has batch size {tensor.shape[0]}, expected {batch_size}", code="mask-batch-size"
            )
    plain = attention_mask is None and document_ids is None
    if plain and window is None and (not causal or n_queries == n_keys):
        # a branch, not a value, so that torch.compile can specialize a symbolic length
        return Mask(causal=True) if causal and n_queries > 1 else Mask()
    if plain and n_queries == 1 and (window is None or window >= n_keys):
        return Mask()  # a single newest query attends to all cached keys
    q_index = torch.arange(n_keys - n_queries, n_keys, device=device)[:, None]
    k_index = torch.arange(n_keys, device=device)[None, :]
    allowed = torch.ones(n_queries, n_keys, dtype=torch.bool, device=device)
    if causal:
        allowed = allowed & (k_index <= q_index)
    if window is not None:
        allowed = allowed & ((q_index - k_index).abs() < window)
    if document_ids is not None:
        document_ids = document_runs(document_ids)
        allowed = allowed & (document_ids[:, None, -n_queries:, None] == document_ids[:, None, None, :])
    if attention_mask is not None:
        # A padded query attends to itself: a fully masked row would be NaN. No real query attends to padding.
        allowed = (allowed & attention_mask[:, None, None, :].bool()) | (q_index == k_index)
    return Mask(allowed=allowed)


def document_runs(document_ids: Tensor) -> Tensor:
    """Number consecutive runs of equal ids (B, T), so that an id that returns is a new document."""
    _check_2d("document_ids", document_ids)
    changes = document_ids[:, 1:] != document_ids[:, :-1]
    first = torch.zeros_like(document_ids[:, :1], dtype=torch.bool)
    return torch.cat((first, changes), dim=1).cumsum(dim=1)


def document_positions(document_ids: Tensor) -> Tensor:
    """Return positions (B, T) that restart at 0 with each document."""
    _check_2d("document_ids", document_ids)
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    is_first = torch.ones_like(document_ids, dtype=torch.bool)
    is_first[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return index - torch.where(is_first, index, 0).cummax(dim=1).values


def _check_2d(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 2:
        raise InputError(
            f"{name} must have the shape (batch, tokens), not {tuple(tensor.shape)}", code="mask-shape"
        )
