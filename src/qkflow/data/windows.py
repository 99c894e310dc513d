"""Windows of tokens to train and to evaluate on.

Training windows are a pure function of (seed, step): nothing is stored, so the position of a run in its data
is the number of its step, however large the corpus. Evaluation windows predict every token exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from qkflow.errors import InputError

_FEISTEL_ROUNDS = (
    6  # of the Feistel network; four suffice for a pseudo-random permutation (Luby & Rackoff 1988)
)


class TrainWindows:
    """Batches of `length + 1` consecutive tokens, every window of an epoch once, in a new order each epoch.

    An epoch cuts the tokens into consecutive windows (neighbours share one token: the last target of one is
    the first input of the next) from an offset of its own, so that over epochs every position is
    met at every place of a window. The order is a keyed permutation of the windows.

    Under data parallelism rank r of `world` gets the r-th part of the same global batch of `batch` windows.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        seq_len: int,
        batch_size: int,
        seed: int,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if seq_len < 1 or batch_size < 1:
            raise InputError(
                f"windows need a length and a batch of at least 1, not {seq_len} and {batch_size}"
            )
        if len(tokens) < seq_len + 1:
            raise InputError(
                f"the training text has {len(tokens)} tokens, fewer than one window of {seq_len + 1}: "
                "take a longer text or a shorter window"
            )
        if batch_size % world_size:
            raise InputError(
                f"a batch of {batch_size} windows cannot be shared equally by {world_size} processes"
            )
        self.tokens, self.seq_len, self.batch_size, self.seed = tokens, seq_len, batch_size, seed
        self._rows = np.arange(rank * batch_size // world_size, (rank + 1) * batch_size // world_size)
        # One window less than fit leaves room for the offset, and makes every epoch equally long.
        self.windows_per_epoch = max(1, (len(tokens) - seq_len) // seq_len)
        self._max_offset = len(tokens) - 1 - self.windows_per_epoch * seq_len

    def starts(self, step: int) -> np.ndarray:
        """Where the windows of this rank's part of batch `step` begin."""
        positions = step * self.batch_size + self._rows
        starts = np.empty_like(positions)
        for epoch in np.unique(positions // self.windows_per_epoch).tolist():
            inside = positions // self.windows_per_epoch == epoch
            keys = _epoch_keys(self.seed, epoch)
            order = feistel_permutation(
                positions[inside] % self.windows_per_epoch, self.windows_per_epoch, keys[1:]
            )
            starts[inside] = order * self.seq_len + int(keys[0]) % (self._max_offset + 1)
        return starts

    def batch(self, step: int) -> np.ndarray:
        """Tokens of batch `step`, (this rank's windows, length + 1): inputs are [:, :-1], targets [:, 1:]."""
        return self.tokens[self.starts(step)[:, None] + np.arange(self.seq_len + 1)].astype(np.int64)


class EvalWindows:
    """Consecutive windows in which every token of a split is a target exactly once.

    The first token is predicted from the split's last one, which in a prepared set is the end-of-document
    token, as any document's first token is. With `limit` (in tokens), windows spread evenly over the split.
    `predicted` counts the targets and `covered_bytes` the UTF-8 bytes they stand for, so that
    bits per byte = mean loss / ln 2 * predicted / covered_bytes.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        seq_len: int,
        batch_size: int,
        max_tokens: int | None = None,
        *,
        token_bytes: np.ndarray | None = None,
    ) -> None:
        if len(tokens) == 0:
            raise InputError("the split to evaluate on is empty")
        self.tokens, self.seq_len, self.batch_size = tokens, seq_len, batch_size
        windows = -(-len(tokens) // seq_len)
        wanted = windows if max_tokens is None else min(windows, max(1, max_tokens // seq_len))
        self._starts = np.arange(wanted) * windows // wanted * seq_len
        self.n_targets = int(np.minimum(len(tokens) - self._starts, seq_len).sum())
        self.n_target_bytes = (
            None if token_bytes is None else int(sum(token_bytes[w].sum() for w in self._targets()))
        )

    def _targets(self) -> Iterator[np.ndarray]:
        return (self.tokens[start : start + self.seq_len] for start in self._starts)

    def __len__(self) -> int:
        return -(-len(self._starts) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(inputs, targets) of each batch, both (windows, length); a target of -100 lies beyond the end."""
        for first in range(0, len(self._starts), self.batch_size):
            starts = self._starts[first : first + self.batch_size]
            places = starts[:, None] + np.arange(-1, self.seq_len)
            within = places < len(self.tokens)
            # -1 is the last token, which precedes the first; beyond the end anything will do
            window = self.tokens[np.where(within, places, -1)].astype(np.int64)
            yield window[:, :-1], np.where(within[:, 1:], window[:, 1:], -100)


def document_ids(inputs: np.ndarray, eos_token_id: int) -> np.ndarray:
    """Which document of its window each position belongs to, counted from 0, for packed attention.

    An end-of-document token belongs to the document it ends.
    """
    ends = inputs == eos_token_id
    return np.cumsum(ends, axis=-1) - ends


def feistel_permutation(indices: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """The places of `indices` in a permutation of range(size) that the keys choose, without making a table.

    A Feistel network permutes the numbers of 2·h bits, the smallest such range that holds `size`; numbers
    that land beyond `size` are permuted again until they do not (cycle walking; Black & Rogaway 2002).
    """
    half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
    mask = np.uint64((1 << int(half)) - 1)
    places = indices.astype(np.uint64)
    pending = np.ones(len(places), bool)
    while pending.any():
        left, right = places[pending] >> half, places[pending] & mask
        for key in keys:
            left, right = right, left ^ (_splitmix64(right + key) & mask)
        places[pending] = left << half | right
        pending = places >= size
    return places.astype(np.int64)


def _epoch_keys(seed: int, epoch: int) -> np.ndarray:
    """An offset and the round keys of an epoch."""
    start = _splitmix64(np.array([seed % 2**64], np.uint64)) ^ np.uint64(epoch)
    return _splitmix64(_splitmix64(start) + np.arange(1, _FEISTEL_ROUNDS + 2, dtype=np.uint64))


def _splitmix64(values: np.ndarray) -> np.ndarray:
    """The output function of splitmix64 (Steele, Lea & Flood 2014): each bit depends on every other."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
