"""Cache of the slow path for incremental decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qkflow.attention.kv_cache import KVCache
from qkflow.errors import InputError


class SlowPathCache:
    """Preallocated inputs (B, capacity, C), KV caches and outputs (B, capacity // P + 1, C) of a slow path.

    It supports `crop` and `reorder` like `KVCache`. It stores the inputs instead of the running sum of the
    incomplete block, because `crop` may end in the middle of a block. That costs as much memory as half a
    layer's KV cache.
    """

    def __init__(
        self, ratio: int, kv_caches: list[KVCache], batch: int, capacity: int, dim: int, **factory_kwargs: Any
    ) -> None:
        self.ratio, self.kv_caches = ratio, kv_caches
        self.length = 0  # tokens
        self._inputs = torch.empty(batch, capacity, dim, **factory_kwargs)
        # row 0: read by the tokens before the first completed block
        self._outputs = torch.zeros(batch, capacity // ratio + 1, dim, **factory_kwargs)

    @property
    def capacity(self) -> int:
        return self._inputs.shape[1]

    def append_inputs(self, x: Tensor) -> Tensor:
        """Append token inputs (B, t, C). Return the means (B, k, C) of the blocks they complete, k ≥ 0."""
        batch, new, _ = x.shape
        if batch != len(self._inputs):
            raise InputError(
                f"the cache was built for batch size {len(self._inputs)}, not {batch}",
                code="cache-batch-mismatch",
            )
        before, end = self.length, self.length + new
        if end > self.capacity:
            raise InputError(
                f"the cache is full: capacity {self.capacity}, length {self.length}, {new} new tokens; "
                "build it with a larger capacity",
                code="cache-full",
            )
        self._inputs[:, before:end] = x
        self.length = end
        first, last = before // self.ratio, end // self.ratio
        if first == last:
            return x[:, :0]
        completed = self._inputs[:, first * self.ratio : last * self.ratio]
        return completed.unflatten(1, (last - first, self.ratio)).mean(2)

    def append_outputs(self, u: Tensor) -> None:
        """Store the outputs u (B, k, C) of the blocks that `append_inputs` returned."""
        end = self.length // self.ratio
        self._outputs[:, end + 1 - u.shape[1] : end + 1] = u

    def read_outputs(self, n_tokens: int) -> Tensor:
        """Return ũ (B, n_tokens, C) of the last tokens: u of the last completed block, or zeros."""
        if n_tokens == 1:
            last = self.length // self.ratio
            return self._outputs[:, last : last + 1]
        tokens = torch.arange(self.length - n_tokens, self.length, device=self._outputs.device)
        return self._outputs[:, (tokens + 1) // self.ratio]

    def reorder(self, beam_idx: Tensor) -> None:
        """Replace batch row i by row `beam_idx[i]` (beam search)."""
        self._inputs = self._inputs.index_select(0, beam_idx)
        self._outputs = self._outputs.index_select(0, beam_idx)
        for kv_cache in self.kv_caches:
            kv_cache.reorder(beam_idx)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens only."""
        if not 0 <= length <= self.length:
            raise InputError(
                f"cannot crop a cache of {self.length} tokens to {length}: the length must lie between 0 and "
                f"{self.length}",
                code="invalid-crop-length",
            )
        self.length = length
        for kv_cache in self.kv_caches:
            kv_cache.crop(length // self.ratio)
