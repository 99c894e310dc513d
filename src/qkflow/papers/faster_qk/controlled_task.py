"""The controlled task of Vashisht & Ramaswamy (ICML 2026, arXiv 2608.06776), as token counts.

The vocabulary has 50 tokens. Ids 0–9 are common to all four classes. Ids 10(i+1)…10(i+1)+9 are the distinct
tokens of class i; the j-th of them (from 1) has j/10 times the weight of a common token. A sequence is T−2
iid context tokens, then the query token 5+i; the target is the label token 1+i.

The model has no positions, so its output depends on token counts only: a batch is a matrix of counts (B, 50).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from qkflow.errors import InputError

VOCAB_SIZE = 50
N_CLASSES = 4
N_COMMON = 10  # ids below this are common, the others distinct
FIRST_LABEL_ID = 1
FIRST_QUERY_ID = 5
LABEL_IDS = slice(FIRST_LABEL_ID, FIRST_LABEL_ID + N_CLASSES)
QUERY_IDS = slice(FIRST_QUERY_ID, FIRST_QUERY_ID + N_CLASSES)

# Ids repeated by weight: a common token 10 times, the j-th distinct token j times. A uniform draw is a token.
_WEIGHTED_IDS = np.repeat(
    np.arange(2 * N_COMMON), np.concatenate([np.full(N_COMMON, 10), np.arange(1, N_COMMON + 1)])
)
_WEIGHTED_IDS_BY_CLASS = np.stack(
    [_WEIGHTED_IDS + np.where(_WEIGHTED_IDS < N_COMMON, 0, N_COMMON * i) for i in range(N_CLASSES)]
)


class BatchStream:
    """The batches of one seed, the same for every config of equal sequence length and batch size.

    With `balanced`, every class has the same number of sequences per batch; otherwise classes are random.
    """

    def __init__(self, seed: int, seq_len: int, batch_size: int, balanced: bool = False) -> None:
        if seq_len < 3:
            raise InputError(
                f"seq_len must be at least 3 (a context token, the query, the label), not {seq_len}",
                code="sequence-too-short",
            )
        if batch_size < 1 or (balanced and batch_size % N_CLASSES):
            valid = f"a positive multiple of {N_CLASSES}" if balanced else "positive"
            raise InputError(f"batch_size must be {valid}, not {batch_size}", code="invalid-batch-size")
        self.seq_len, self.batch_size, self.balanced = seq_len, batch_size, balanced
        self._rng = np.random.default_rng(seed)

    def sample_sequences(self, steps: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return input tokens (steps, B, T − 1), the query last, and classes (steps, B)."""
        if self.balanced:
            classes = np.tile(np.repeat(np.arange(N_CLASSES), self.batch_size // N_CLASSES), (steps, 1))
        else:
            classes = self._rng.integers(0, N_CLASSES, (steps, self.batch_size))
        shape = (steps, self.batch_size, self.seq_len - 2)
        draws = self._rng.integers(0, _WEIGHTED_IDS_BY_CLASS.shape[1], shape, dtype=np.uint16)
        draws += (classes * _WEIGHTED_IDS_BY_CLASS.shape[1]).astype(np.uint16)[..., None]
        tokens = np.concatenate(
            [_WEIGHTED_IDS_BY_CLASS.ravel()[draws], FIRST_QUERY_ID + classes[..., None]], axis=-1
        )
        return tokens, classes

    def next_batches(
        self, steps: int, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next batches: counts (steps, B, 50) and one-hot classes (steps, B, 4)."""
        tokens, classes = self.sample_sequences(steps)
        one_hot = torch.from_numpy(classes[..., None] == np.arange(N_CLASSES)).to(dtype)
        return torch.from_numpy(count_tokens(tokens)).to(dtype), one_hot


def count_tokens(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count each of the 50 ids in each sequence: (…, T) → (…, 50)."""
    rows = tokens.reshape(-1, tokens.shape[-1])
    offsets = np.arange(len(rows))[:, None] * VOCAB_SIZE
    counts = np.bincount((rows + offsets).ravel(), minlength=len(rows) * VOCAB_SIZE)
    return counts.reshape(*tokens.shape[:-1], VOCAB_SIZE)
