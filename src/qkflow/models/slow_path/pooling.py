"""From token rate to block rate and back, without a look at the future.

Every P tokens form a block; a block's value is the mean of its tokens. A token may read a block only once the
block is complete, so token t reads block ⌊(t+1)/P⌋ − 1 and gets zeros while there is none. With packed
documents both rules hold inside each document: blocks start afresh with it, and none is read from outside.

Shapes: B batch, T tokens, K blocks, P ratio, C channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from qkflow.errors import InputError


class BlockPooling(ABC):
    """How T tokens fall into K blocks; the last of a document may be partial, and is then never read."""

    n_blocks: int  # K
    document_ids: Tensor | None  # (B, K), a number for each block's document; None: one document a row

    @abstractmethod
    def pool(self, x: Tensor) -> Tensor:
        """Block means: (B, T, C) → (B, K, C)."""

    @abstractmethod
    def upsample(self, u: Tensor) -> Tensor:
        """What each token reads, the last completed block or zeros: (B, K, C) → (B, T, C)."""


def check_ratio(ratio: int, seq_len: int | None = None) -> None:
    """Refuse a pooling ratio that makes no slow path, or none within a context of `tokens`."""
    if not isinstance(ratio, int) or ratio < 2:
        raise InputError(
            f"the pooling ratio P must be a whole number of at least 2, not {ratio}: "
            "at 1 the slow path is not slow"
        )
    if seq_len is not None and ratio > seq_len:
        raise InputError(
            f"the pooling ratio P = {ratio} is longer than the {seq_len} tokens of the context, so no block "
            "would ever be completed: choose a smaller ratio or a longer context"
        )


def build_block_pooling(seq_len: int, ratio: int, document_ids: Tensor | None = None) -> BlockPooling:
    """The blocks of one sequence, or, with document ids (B, T), of packed documents."""
    if document_ids is None:
        return UniformBlockPooling(seq_len, ratio)
    if document_ids.ndim != 2 or document_ids.shape[1] != seq_len:
        raise InputError(
            f"document ids must have the shape (batch, {seq_len}) of the tokens, not {tuple(document_ids.shape)}"
        )
    return PackedBlockPooling(document_ids, ratio)


class UniformBlockPooling(BlockPooling):
    """One document a row: blocks lie on a grid, so pooling and reading are reshapes."""

    document_ids = None

    def __init__(self, seq_len: int, ratio: int) -> None:
        check_ratio(ratio)
        self.seq_len, self.ratio = seq_len, ratio
        self.n_blocks = -(-seq_len // ratio)

    def pool(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        assert self.seq_len == T
        complete = T // self.ratio * self.ratio
        means = x[:, :complete].reshape(B, T // self.ratio, self.ratio, C).mean(2)
        if complete == T:
            return means
        return torch.cat([means, x[:, complete:].mean(1, keepdim=True)], 1)

    def upsample(self, u: Tensor) -> Tensor:
        B, K, C = u.shape
        # With a block of zeros in front, token t reads block ⌊(t+1)/P⌋: each block P times, from t = −1 on.
        shifted = torch.cat([u.new_zeros(B, 1, C), u], 1)
        repeated = shifted[:, :, None].expand(B, K + 1, self.ratio, C).reshape(B, (K + 1) * self.ratio, C)
        return repeated[:, 1 : self.seq_len + 1]


class PackedBlockPooling(BlockPooling):
    """Several documents a row, told apart by ids (B, T) that change where a document begins.

    Rows differ in how many blocks they hold. K is that of the fullest row unless `count` fixes it (which
    spares a synchronisation with the device); the blocks a row lacks are zeros that nobody reads.
    """

    def __init__(self, document_ids: Tensor, ratio: int, n_blocks: int | None = None) -> None:
        check_ratio(ratio)
        B, T = document_ids.shape
        here = torch.arange(T, device=document_ids.device).expand(B, T)
        begins = torch.ones_like(document_ids, dtype=torch.bool)
        begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
        place = here - torch.where(begins, here, 0).cummax(1).values  # a token's place in its document
        block = (place % ratio == 0).cumsum(1) - 1
        self.ratio = ratio
        self.n_blocks = n_blocks if n_blocks is not None else int(block[:, -1].max()) + 1

        # Blocks of a document are consecutive: the one before an unfinished block is the last completed one.
        self._has_completed_block = place >= ratio - 1
        self._block_index = torch.where(place % ratio == ratio - 1, block, block - 1).clamp(min=0)

        none = here.new_zeros(B, self.n_blocks)
        sizes = none.scatter_add(1, block, torch.ones_like(block))
        first = torch.full_like(none, T).scatter_reduce(1, block, here, "amin").clamp(max=T - 1)
        offsets = torch.arange(ratio, device=document_ids.device)
        self._token_index = (first[..., None] + offsets).clamp(max=T - 1)  # (B, K, P)
        self._token_mask = offsets < sizes[..., None]

        # 0: a block that is not there
        self.document_ids = torch.where(sizes > 0, begins.cumsum(1).gather(1, first), 0)

    def pool(self, x: Tensor) -> Tensor:
        B, _, C = x.shape
        members = self._token_index.reshape(B, -1, 1).expand(-1, -1, C)
        tokens = x.gather(1, members).reshape(B, self.n_blocks, self.ratio, C)
        total = torch.where(self._token_mask[..., None], tokens, 0).sum(2, dtype=_accumulation_dtype(x))
        return (total / self._token_mask.sum(-1).clamp(min=1)[..., None]).to(x.dtype)

    def upsample(self, u: Tensor) -> Tensor:
        read = u.gather(1, self._block_index[..., None].expand(-1, -1, u.shape[-1]))
        return torch.where(self._has_completed_block[..., None], read, 0)


def _accumulation_dtype(x: Tensor) -> torch.dtype:
    """Sums over a block are taken in float32 at least, as `Tensor.mean` takes them."""
    return torch.promote_types(x.dtype, torch.float32)
