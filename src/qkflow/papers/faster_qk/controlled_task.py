"""The controlled task of Vashisht & Ramaswamy (ICML 2026, arXiv 2608.06776), as token counts.

Fifty tokens. Ids 0–9 are common to all four classes; class i alone also draws ids 10(i+1)…10(i+1)+9, the
distinct tokens, the j-th (from 1) with a tenth of j times the weight of a common one. A sequence is T−2
tokens drawn independently, then the query token 5+i; the model must name the label token 1+i.

No token has a position, so attention and output depend on the counts of the tokens alone: a batch is a matrix
of counts, whatever the length.
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

# One urn a class: a common token has ten tickets, the j-th distinct one j. A uniform ticket is a token.
_WEIGHTED_IDS = np.repeat(
    np.arange(2 * N_COMMON), np.concatenate([np.full(N_COMMON, 10), np.arange(1, N_COMMON + 1)])
)
_WEIGHTED_IDS_BY_CLASS = np.stack(
    [_WEIGHTED_IDS + np.where(_WEIGHTED_IDS < N_COMMON, 0, N_COMMON * i) for i in range(N_CLASSES)]
)


class BatchStream:
    """The batches of one seed, the same for every setting of equal length and batch size.

    `balanced` gives every class the same share of each batch instead of drawing the class of every sequence.
    """

    def __init__(self, seed: int, length: int, batch: int, balanced: bool = False) -> None:
        if length < 3:
            raise InputError(
                f"a sequence needs a context token, a query and a label: length 3 or more, not {length}"
            )
        if batch < 1 or (balanced and batch % N_CLASSES):
            wanted = f"a positive multiple of {N_CLASSES}" if balanced else "positive"
            raise InputError(f"the batch size must be {wanted}, not {batch}")
        self.length, self.batch, self.balanced = length, batch, balanced
        self._rng = np.random.default_rng(seed)

    def sample_sequences(self, steps: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Input tokens (steps, batch, length − 1), the query last, and classes (steps, batch)."""
        if self.balanced:
            classes = np.tile(np.repeat(np.arange(N_CLASSES), self.batch // N_CLASSES), (steps, 1))
        else:
            classes = self._rng.integers(0, N_CLASSES, (steps, self.batch))
        shape = (steps, self.batch, self.length - 2)
        tickets = self._rng.integers(0, _WEIGHTED_IDS_BY_CLASS.shape[1], shape, dtype=np.uint16)
        tickets += (classes * _WEIGHTED_IDS_BY_CLASS.shape[1]).astype(np.uint16)[..., None]
        tokens = np.concatenate(
            [_WEIGHTED_IDS_BY_CLASS.ravel()[tickets], FIRST_QUERY_ID + classes[..., None]], axis=-1
        )
        return tokens, classes

    def next_batches(
        self, steps: int, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The next batches: counts (steps, batch, 50) and one-hot classes (steps, batch, 4)."""
        tokens, classes = self.sample_sequences(steps)
        one_hot = torch.from_numpy(classes[..., None] == np.arange(N_CLASSES)).to(dtype)
        return torch.from_numpy(count_tokens(tokens)).to(dtype), one_hot


def count_tokens(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """How often each of the fifty ids occurs in each sequence: (…, length) → (…, 50)."""
    rows = tokens.reshape(-1, tokens.shape[-1])
    offsets = np.arange(len(rows))[:, None] * VOCAB_SIZE
    counts = np.bincount((rows + offsets).ravel(), minlength=len(rows) * VOCAB_SIZE)
    return counts.reshape(*tokens.shape[:-1], VOCAB_SIZE)
