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


class Blocks(ABC):
    """How T tokens fall into K blocks; the last of a document may be partial, and is then never read."""

    count: int  # K
    documents: Tensor | None  # (B, K), a number for each block's document; None: one document a row

    @abstractmethod
    def pool(self, x: Tensor) -> Tensor:
        """Block means: (B, T, C) → (B, K, C)."""

    @abstractmethod
    def feedback(self, u: Tensor) -> Tensor:
        """What each token reads, the last completed block or zeros: (B, K, C) → (B, T, C)."""


def check_ratio(ratio: int, tokens: int | None = None) -> None:
    """Refuse a pooling ratio that makes no slow path, or none within a context of `tokens`."""
    if not isinstance(ratio, int) or ratio < 2:
        raise InputError(
            f"the pooling ratio P must be a whole number of at least 2, not {ratio}: "
            "at 1 the slow path is not slow"
        )
    if tokens is not None and ratio > tokens:
        raise InputError(
            f"the pooling ratio P = {ratio} is longer than the {tokens} tokens of the context, so no block "
            "would ever be completed: choose a smaller ratio or a longer context"
        )


def blocks(tokens: int, ratio: int, documents: Tensor | None = None) -> Blocks:
    """The blocks of one sequence, or, with document ids (B, T), of packed documents."""
    if documents is None:
        return PlainBlocks(tokens, ratio)
    if documents.ndim != 2 or documents.shape[1] != tokens:
        raise InputError(
            f"document ids must have the shape (batch, {tokens}) of the tokens, not {tuple(documents.shape)}"
        )
    return PackedBlocks(documents, ratio)


class PlainBlocks(Blocks):
    """One document a row: blocks lie on a grid, so pooling and reading are reshapes."""

    documents = None

    def __init__(self, tokens: int, ratio: int) -> None:
        check_ratio(ratio)
        self.tokens, self.ratio = tokens, ratio
        self.count = -(-tokens // ratio)

    def pool(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        assert self.tokens == T
        complete = T // self.ratio * self.ratio
        means = x[:, :complete].reshape(B, T // self.ratio, self.ratio, C).mean(2)
        if complete == T:
            return means
        return torch.cat([means, x[:, complete:].mean(1, keepdim=True)], 1)

    def feedback(self, u: Tensor) -> Tensor:
        B, K, C = u.shape
        # With a block of zeros in front, token t reads block ⌊(t+1)/P⌋: each block P times, from t = −1 on.
        shifted = torch.cat([u.new_zeros(B, 1, C), u], 1)
        repeated = shifted[:, :, None].expand(B, K + 1, self.ratio, C).reshape(B, (K + 1) * self.ratio, C)
        return repeated[:, 1 : self.tokens + 1]


class PackedBlocks(Blocks):
    """Several documents a row, told apart by ids (B, T) that change where a document begins.

    Rows differ in how many blocks they hold. K is that of the fullest row unless `count` fixes it (which
    spares a synchronisation with the device); the blocks a row lacks are zeros that nobody reads.
    """

    def __init__(self, documents: Tensor, ratio: int, count: int | None = None) -> None:
        check_ratio(ratio)
        B, T = documents.shape
        here = torch.arange(T, device=documents.device).expand(B, T)
        begins = torch.ones_like(documents, dtype=torch.bool)
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        place = here - torch.where(begins, here, 0).cummax(1).values  # a token's place in its document
        block = (place % ratio == 0).cumsum(1) - 1
        self.ratio = ratio
        self.count = count if count is not None else int(block[:, -1].max()) + 1

        # Blocks of a document are consecutive: the one before an unfinished block is the last completed one.
        self._readable = place >= ratio - 1
        self._reads = torch.where(place % ratio == ratio - 1, block, block - 1).clamp(min=0)

        none = here.new_zeros(B, self.count)
        sizes = none.scatter_add(1, block, torch.ones_like(block))
        first = torch.full_like(none, T).scatter_reduce(1, block, here, "amin").clamp(max=T - 1)
        offsets = torch.arange(ratio, device=documents.device)
        self._members = (first[..., None] + offsets).clamp(max=T - 1)  # (B, K, P)
        self._filled = offsets < sizes[..., None]

        # 0: a block that is not there
        self.documents = torch.where(sizes > 0, begins.cumsum(1).gather(1, first), 0)

    def pool(self, x: Tensor) -> Tensor:
        B, _, C = x.shape
        members = self._members.reshape(B, -1, 1).expand(-1, -1, C)
        tokens = x.gather(1, members).reshape(B, self.count, self.ratio, C)
        total = torch.where(self._filled[..., None], tokens, 0).sum(2, dtype=_sum_type(x))
        return (total / self._filled.sum(-1).clamp(min=1)[..., None]).to(x.dtype)

    def feedback(self, u: Tensor) -> Tensor:
        read = u.gather(1, self._reads[..., None].expand(-1, -1, u.shape[-1]))
        return torch.where(self._readable[..., None], read, 0)


def _sum_type(x: Tensor) -> torch.dtype:
    """Sums over a block are taken in float32 at least, as `Tensor.mean` takes them."""
    return torch.promote_types(x.dtype, torch.float32)
