"""Make the batches: `TrainWindows.batch(step)` for training, iteration over `EvalWindows` for evaluation.

A window is `seq_len` consecutive tokens and their targets, the tokens one position later. A training batch is
a pure function of (seed, step): a loader has no state, and resuming a run needs only its step. Evaluation
windows have every token of a split as a target exactly once.

    TrainWindows.batch(step)   (batch_size / world_size, seq_len + 1) int64; inputs [:, :-1], targets [:, 1:]
    iter(EvalWindows)          (inputs, targets), both (<= batch_size, seq_len) int64; target -100 is ignored
    document_ids(inputs, eos)  (B, T) int64, for attention that stays within a document
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from qkflow.errors import InputError

_FEISTEL_ROUNDS = 6  # four give a pseudo-random permutation (Luby & Rackoff 1988)


def check_token_ids(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return token ids. Raise InputError for one that the tokenizer lacks: token sets are opened with a check
    of sampled blocks only, and a damaged block between them would be an index error of the embedding.
    """
    if ids.size and (ids.max() >= vocab_size or ids.min() < 0):
        raise InputError(
            f"the prepared corpus has the token id {ids.max()}, its tokenizer only {vocab_size} tokens: the "
            "cache is damaged, and `qkflow data verify` prepares it again",
            code="corrupt-token-set",
        )
    return ids


class TrainWindows:
    """Training batches of windows: each window of an epoch once, in a new order per epoch.

    An epoch cuts the tokens into consecutive windows from a random offset, so that over epochs a token occurs
    at every position of a window. Neighboring windows share one token: the last target of one is the first
    input of the next. The order is a keyed permutation of the windows.

    Under data parallelism, rank r gets the r-th part of the same global batch of `batch_size` windows.
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
        vocab_size: int | None = None,
    ) -> None:
        if seq_len < 1 or batch_size < 1:
            raise InputError(
                f"seq_len and batch_size must be at least 1, not {seq_len} and {batch_size}",
                code="invalid-window",
            )
        if len(tokens) < seq_len + 1:
            raise InputError(
                f"the training text has {len(tokens)} tokens, fewer than one window of {seq_len + 1}: "
                "use a longer text or a smaller seq_len",
                code="text-too-short",
            )
        if batch_size % world_size:
            raise InputError(
                f"a batch_size of {batch_size} is not divisible by {world_size} processes",
                code="batch-not-divisible",
            )
        self.tokens, self.seq_len, self.batch_size, self.seed = tokens, seq_len, batch_size, seed
        self._vocab_size = vocab_size
        self._rows = np.arange(rank * batch_size // world_size, (rank + 1) * batch_size // world_size)
        # One window fewer than fit leaves space for the offset, and gives all epochs the same length.
        self.windows_per_epoch = max(1, (len(tokens) - seq_len) // seq_len)
        self._max_offset = len(tokens) - 1 - self.windows_per_epoch * seq_len

    def starts(self, step: int) -> np.ndarray:
        """Return the first token's index of each of this rank's windows in batch `step`."""
        positions = step * self.batch_size + self._rows
        epochs, firsts = np.unique(positions // self.windows_per_epoch, return_index=True)
        starts = []
        for epoch, in_epoch in zip(epochs.tolist(), np.split(positions, firsts[1:]), strict=True):
            keys = _epoch_keys(self.seed, epoch)
            order = feistel_permutation(in_epoch % self.windows_per_epoch, self.windows_per_epoch, keys[1:])
            starts.append(order * self.seq_len + int(keys[0]) % (self._max_offset + 1))
        return np.concatenate(starts)

    def batch(self, step: int) -> np.ndarray:
        """Return this rank's part of batch `step`, (batch_size / world_size, seq_len + 1) int64.

        Inputs are [:, :-1], targets [:, 1:].
        """
        batch = self.tokens[self.starts(step)[:, None] + np.arange(self.seq_len + 1)].astype(np.int64)
        return batch if self._vocab_size is None else check_token_ids(batch, self._vocab_size)


class EvalWindows:
    """Evaluation batches of consecutive windows: every token of a split is a target exactly once.

    The input before the first token is the split's last token; in a token set that is the end-of-document
    token, which precedes every other document too. `max_tokens` selects windows spread evenly over the split.
    `n_targets` counts the targets and `n_target_bytes` their UTF-8 bytes, so that
    bits per byte = mean loss / ln 2 * n_targets / n_target_bytes.
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
            raise InputError("the split to evaluate on is empty: choose another split", code="empty-split")
        self.tokens, self.seq_len, self.batch_size = tokens, seq_len, batch_size
        n_available = -(-len(tokens) // seq_len)
        n_windows = n_available if max_tokens is None else min(n_available, max(1, max_tokens // seq_len))
        self._starts = np.arange(n_windows) * n_available // n_windows * seq_len
        self.n_targets = int(np.minimum(len(tokens) - self._starts, seq_len).sum())
        self._token_bytes = token_bytes
        self.n_target_bytes = (
            None
            if token_bytes is None
            else int(sum(self._count_bytes(tokens[start : start + seq_len]) for start in self._starts))
        )

    def _count_bytes(self, tokens: np.ndarray) -> int:
        assert self._token_bytes is not None
        return int(self._token_bytes[check_token_ids(tokens, len(self._token_bytes))].sum())

    def __len__(self) -> int:
        return -(-len(self._starts) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (inputs, targets), both (<= batch_size, seq_len); targets beyond the end are -100."""
        for first in range(0, len(self._starts), self.batch_size):
            starts = self._starts[first : first + self.batch_size]
            indices = starts[:, None] + np.arange(-1, self.seq_len)
            inside = indices < len(self.tokens)
            # Index -1, before the first token, is the last token. Beyond the end any token will do.
            window = self.tokens[np.where(inside, indices, -1)].astype(np.int64)
            yield window[:, :-1], np.where(inside[:, 1:], window[:, 1:], -100)


def document_ids(inputs: np.ndarray, eos_token_id: int) -> np.ndarray:
    """Number the documents of each window from 0: (B, T) token ids to (B, T) document ids.

    An end-of-document token belongs to the document that it ends. Ids never decrease along a row, so that
    each document is one contiguous run and its positions restart once.
    """
    ends = inputs == eos_token_id
    return np.cumsum(ends, axis=-1) - ends


def feistel_permutation(indices: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Return the images of `indices` under a permutation of range(size) chosen by `keys`, without a table.

    A Feistel network permutes the integers of 2·h bits, the smallest such range that holds `size`. Images
    beyond `size` are permuted again until they are below it (cycle walking; Black & Rogaway 2002).
    """
    half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
    mask = np.uint64((1 << int(half)) - 1)
    images = indices.astype(np.uint64)
    pending = np.ones(len(images), bool)
    while pending.any():
        left, right = images[pending] >> half, images[pending] & mask
        for key in keys:
            left, right = right, left ^ (_splitmix64(right + key) & mask)
        images[pending] = left << half | right
        pending = images >= size
    return images.astype(np.int64)


def _epoch_keys(seed: int, epoch: int) -> np.ndarray:
    """Return the window offset (before the modulus) and the Feistel round keys of an epoch."""
    state = _splitmix64(np.array([seed % 2**64], np.uint64)) ^ np.uint64(epoch)
    return _splitmix64(_splitmix64(state) + np.arange(1, _FEISTEL_ROUNDS + 2, dtype=np.uint64))


def _splitmix64(values: np.ndarray) -> np.ndarray:
    """Apply the output function of splitmix64 (Steele, Lea & Flood 2014): each bit depends on every other."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
