"""Key/value cache for incremental decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from qkflow.errors import InputError


class KVCache:
    """Preallocated buffers of one layer's coupled, rotated keys and its values.

    The coupling acts on each token alone, so a coupled key never changes and can be cached.
    """

    def __init__(
        self,
        batch_size: int,
        capacity: int,
        n_k: int,
        head_dim: int,
        n_v: int,
        v_head_dim: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if batch_size < 0 or capacity < 0:
            raise InputError(
                f"capacity {capacity} and batch size {batch_size} must not be negative", code="bad-cache-size"
            )
        self.keys = torch.empty(batch_size, n_k, capacity, head_dim, device=device, dtype=dtype)
        self.values = torch.empty(batch_size, n_v, capacity, v_head_dim, device=device, dtype=dtype)
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values (B, T, G, D) and return all cached ones in the same layout."""
        batch, new = k.shape[0], k.shape[1]
        if batch != self.keys.shape[0]:
            raise InputError(
                f"the cache has batch size {self.keys.shape[0]}, not {batch}", code="cache-batch-size"
            )
        end = self.length + new
        if end > self.capacity:
            raise InputError(
                f"the cache is full: capacity {self.capacity}, {self.length} tokens cached, {new} more: "
                "use a larger capacity",
                code="cache-full",
            )
        self.keys[:, :, self.length : end] = k.transpose(1, 2)
        self.values[:, :, self.length : end] = v.transpose(1, 2)
        self.length = end
        return self.keys[:, :, :end].transpose(1, 2), self.values[:, :, :end].transpose(1, 2)

    def reorder(self, beam_idx: Tensor) -> None:
        """Select batch rows: row i continues from row `beam_idx[i]` (beam search)."""
        self.keys = self.keys.index_select(0, beam_idx)
        self.values = self.values.index_select(0, beam_idx)

    def crop(self, length: int) -> None:
        """Drop everything after the first `length` tokens."""
        if not 0 <= length <= self.length:
            raise InputError(
                f"cannot crop a cache of {self.length} tokens to {length}", code="bad-cache-crop"
            )
        self.length = length
