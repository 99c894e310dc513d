"""Causal block-mean pooling from token rate to block rate, and upsampling back.

    pool      y_k = mean of x_t over the tokens of block k             (B, T, C) → (B, K, C)
    upsample  ũ_t = u_{⌊(t+1)/P⌋ − 1}, the last completed block or 0   (B, K, C) → (B, T, C)

With packed documents both hold within each document: block boundaries restart with it, and its tokens read no
block of another document.

Shapes: B batch, T tokens, K blocks, P ratio, C channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from qkflow.attention.masks import document_positions
from qkflow.errors import InputError


class BlockPooling(ABC):
    """Assignment of T tokens to K blocks. The last block of a document may be partial; it is never read."""

    n_blocks: int  # K
    document_ids: Tensor | None  # (B, K), the document of each block; None: one document per row

    @abstractmethod
    def pool(self, x: Tensor) -> Tensor:
        """Return block means: (B, T, C) → (B, K, C)."""

    @abstractmethod
    def upsample(self, u: Tensor) -> Tensor:
        """Return the last completed block of each token, or zeros: (B, K, C) → (B, T, C)."""


def check_ratio(ratio: int, seq_len: int | None = None) -> None:
    """Raise if P is not an integer of at least 2, or exceeds `seq_len`."""
    if not isinstance(ratio, int) or ratio < 2:
        raise InputError(
            f"the pooling ratio P must be an integer of at least 2, not {ratio}", code="invalid-pooling-ratio"
        )
    if seq_len is not None and ratio > seq_len:
        raise InputError(
            f"the pooling ratio P = {ratio} exceeds the sequence length {seq_len}, so no block would ever be "
            "completed; choose a smaller ratio or longer sequences",
            code="ratio-exceeds-length",
        )


def build_block_pooling(seq_len: int, ratio: int, document_ids: Tensor | None = None) -> BlockPooling:
    """Build the pooling of rows of `seq_len` tokens; with `document_ids` (B, T), of packed documents."""
    if document_ids is None:
        return UniformBlockPooling(seq_len, ratio)
    if document_ids.ndim != 2 or document_ids.shape[1] != seq_len:
        raise InputError(
            f"document_ids must have shape (batch, {seq_len}), not {tuple(document_ids.shape)}",
            code="document-ids-shape",
        )
    return PackedBlockPooling(document_ids, ratio)


class UniformBlockPooling(BlockPooling):
    """One document per row: block boundaries are multiples of P, so both maps are reshapes."""

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
        # After prepending a block of zeros, token t reads block ⌊(t+1)/P⌋: repeat each P times, drop t = −1.
        shifted = torch.cat([u.new_zeros(B, 1, C), u], 1)
        repeated = shifted[:, :, None].expand(B, K + 1, self.ratio, C).reshape(B, (K + 1) * self.ratio, C)
        return repeated[:, 1 : self.seq_len + 1]


class PackedBlockPooling(BlockPooling):
    """Several documents per row: ids (B, T) change where a new document begins.

    K is the largest number of blocks in a row, unless `n_blocks` fixes it, which avoids a device
    synchronization. Rows with fewer blocks are padded with zero blocks that no token reads.
    """

    def __init__(self, document_ids: Tensor, ratio: int, n_blocks: int | None = None) -> None:
        check_ratio(ratio)
        B, T = document_ids.shape
        index = torch.arange(T, device=document_ids.device).expand(B, T)
        position = document_positions(document_ids)
        block = (position % ratio == 0).cumsum(1) - 1
        self.ratio = ratio
        self.n_blocks = n_blocks if n_blocks is not None else int(block[:, -1].max()) + 1

        # Blocks of a document are consecutive: the last completed block precedes the incomplete one.
        self._has_completed_block = position >= ratio - 1
        self._block_index = torch.where(position % ratio == ratio - 1, block, block - 1).clamp(min=0)

        zeros = index.new_zeros(B, self.n_blocks)
        sizes = zeros.scatter_add(1, block, torch.ones_like(block))
        first = torch.full_like(zeros, T).scatter_reduce(1, block, index, "amin").clamp(max=T - 1)
        offsets = torch.arange(ratio, device=document_ids.device)
        self._token_index = (first[..., None] + offsets).clamp(max=T - 1)  # (B, K, P)
        self._token_mask = offsets < sizes[..., None]

        number = (position == 0).cumsum(1)  # of the document, from 1
        self.document_ids = torch.where(sizes > 0, number.gather(1, first), 0)  # 0: padding

    def pool(self, x: Tensor) -> Tensor:
        B, _, C = x.shape
        index = self._token_index.reshape(B, -1, 1).expand(-1, -1, C)
        tokens = x.gather(1, index).reshape(B, self.n_blocks, self.ratio, C)
        total = torch.where(self._token_mask[..., None], tokens, 0).sum(2, dtype=_accumulation_dtype(x))
        return (total / self._token_mask.sum(-1).clamp(min=1)[..., None]).to(x.dtype)

    def upsample(self, u: Tensor) -> Tensor:
        last = u.gather(1, self._block_index[..., None].expand(-1, -1, u.shape[-1]))
        return torch.where(self._has_completed_block[..., None], last, 0)


def _accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of block sums: at least float32, as in `Tensor.mean`."""
    return torch.promote_types(x.dtype, torch.float32)
