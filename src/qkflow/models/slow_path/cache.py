"""What incremental decoding keeps of the slow path."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qkflow.attention.kv_cache import KVCache
from qkflow.errors import InputError


class SlowPathCache:
    """A decoder's slow path between chunks of tokens: what it was fed, its layers' caches, what it said.

    It can be rewound and reordered like the `KVCache` of a layer. To be rewound into the middle of a block it
    keeps the tokens' inputs rather than a running sum of the unfinished block, at the price of half a layer's
    cache.
    """

    def __init__(
        self, ratio: int, kv_caches: list[KVCache], batch: int, capacity: int, dim: int, **factory_kwargs: Any
    ) -> None:
        self.ratio, self.kv_caches = ratio, kv_caches
        self.length = 0  # tokens
        self._inputs = torch.empty(batch, capacity, dim, **factory_kwargs)
        # row 0 is what tokens hear before the first block is complete: nothing
        self._outputs = torch.zeros(batch, capacity // ratio + 1, dim, **factory_kwargs)

    @property
    def capacity(self) -> int:
        return self._inputs.shape[1]

    def append_inputs(self, x: Tensor) -> Tensor:
        """Take the next tokens (B, t, C); returns the means (B, k, C) of the blocks they complete."""
        batch, new, _ = x.shape
        if batch != len(self._inputs):
            raise InputError(f"the cache holds a batch of {len(self._inputs)}, not {batch}")
        before, end = self.length, self.length + new
        if end > self.capacity:
            raise InputError(
                f"the cache has room for {self.capacity} tokens, {self.length} are in it and {new} more "
                "do not fit: make it with a larger capacity"
            )
        self._inputs[:, before:end] = x
        self.length = end
        first, last = before // self.ratio, end // self.ratio
        if first == last:
            return x[:, :0]
        completed = self._inputs[:, first * self.ratio : last * self.ratio]
        return completed.unflatten(1, (last - first, self.ratio)).mean(2)

    def append_outputs(self, u: Tensor) -> None:
        """Take the slow output (B, k, C) of the blocks just completed."""
        end = self.length // self.ratio
        self._outputs[:, end + 1 - u.shape[1] : end + 1] = u

    def read_outputs(self, n_tokens: int) -> Tensor:
        """What each of the last `count` tokens reads: the last completed block or zeros."""
        if n_tokens == 1:
            last = self.length // self.ratio
            return self._outputs[:, last : last + 1]
        tokens = torch.arange(self.length - n_tokens, self.length, device=self._outputs.device)
        return self._outputs[:, (tokens + 1) // self.ratio]

    def reorder(self, rows: Tensor) -> None:
        """Let batch row i go on from what row `rows[i]` has read (beam search)."""
        self._inputs = self._inputs.index_select(0, rows)
        self._outputs = self._outputs.index_select(0, rows)
        for layer in self.kv_caches:
            layer.reorder(rows)

    def crop(self, length: int) -> None:
        """Forget everything after the first `length` tokens."""
        if not 0 <= length <= self.length:
            raise InputError(f"cannot rewind a cache of {self.length} tokens to {length}")
        self.length = length
        for layer in self.kv_caches:
            layer.crop(length // self.ratio)
