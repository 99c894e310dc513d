"""Which key each query may see."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qkflow.errors import InputError


@dataclass(frozen=True)
class Mask:
    """`causal` alone lets the fused kernel skip the future; `allowed` (…, T, S) spells everything out."""

    causal: bool = False
    allowed: Tensor | None = None  # True = may be seen; broadcasts to (B, 1, T, S)

    def matrix(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """The same as one boolean matrix, for reference implementations."""
        if self.allowed is not None:
            return self.allowed
        everything = torch.ones(queries, keys, dtype=torch.bool, device=device)
        return everything.tril(keys - queries) if self.causal else everything


def build_mask(
    queries: int,
    keys: int,
    *,
    causal: bool,
    window: int | None = None,
    padding: Tensor | None = None,
    documents: Tensor | None = None,
    device: torch.device | None = None,
    batch: int | None = None,
) -> Mask:
    """Combine every reason not to see a key.

    The queries are the last `queries` of the `keys` tokens. `padding` (B, S) is True at real tokens,
    `documents` (B, S) numbers each token's document; both cover all keys.
    """
    for name, given in (("padding", padding), ("documents", documents)):
        if given is None:
            continue
        _check_rows(name, given)
        if given.shape[1] != keys:
            raise InputError(f"{name} covers {given.shape[1]} tokens, but there are {keys}")
        if batch is not None and given.shape[0] not in (1, batch):
            raise InputError(f"{name} is for {given.shape[0]} sequences, but there are {batch}")
    plain = padding is None and documents is None
    if plain and window is None and (not causal or queries == keys):
        # a branch, not a value: a compiler that holds the length as a symbol then settles it
        return Mask(causal=True) if causal and queries > 1 else Mask()
    if plain and queries == 1 and (window is None or window >= keys):
        return Mask()  # a single newest query sees everything kept
    q_index = torch.arange(keys - queries, keys, device=device)[:, None]
    k_index = torch.arange(keys, device=device)[None, :]
    allowed = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if causal:
        allowed = allowed & (k_index <= q_index)
    if window is not None:
        allowed = allowed & ((q_index - k_index).abs() < window)
    if documents is not None:
        allowed = allowed & (documents[:, None, -queries:, None] == documents[:, None, None, :])
    if padding is not None:
        # A padded query may see itself: a row that sees nothing would be NaN, and no real query
        # ever sees a padded key.
        allowed = (allowed & padding[:, None, None, :].bool()) | (q_index == k_index)
    return Mask(allowed=allowed)


def document_positions(documents: Tensor) -> Tensor:
    """Positions (B, T) that restart at 0 with each document."""
    _check_rows("documents", documents)
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(starts, index, 0).cummax(dim=1).values


def _check_rows(name: str, given: Tensor) -> None:
    if given.dim() != 2:
        raise InputError(f"{name} must have the shape (batch, tokens), not {tuple(given.shape)}")
