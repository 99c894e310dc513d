"""The difference of two causal softmaxes over the same keys and values, as a processor likes it.

PyTorch's fused kernel would run twice as often as for one softmax. But both share their keys and values, so
their weights can be subtracted first: one product with the values instead of two, forward and backward. Rows
are taken in blocks small enough for the cache, each with the keys up to its own end; nothing but the inputs
is kept for the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from qkflow.attention.masks import Mask
from qkflow.autograd import CustomFunction

BLOCK = 32  # rows
PAYS_FROM = 128  # tokens; shorter than that, there is nothing to skip


def supports(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> bool:
    """Whether to train this way: on a processor, where every token sees all before it."""
    return (
        q.device.type == "cpu"
        and q.dtype in (torch.float32, torch.float64)
        and q.dtype == k.dtype == v.dtype
        and q.shape[1] == k.shape[1] >= PAYS_FROM
        and mask.causal
        and mask.allowed is None
        and dropout == 0
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


def softmax_difference(q: Tensor, k: Tensor, v: Tensor, strength: Tensor, scale: float) -> Tensor:
    """(softmax(q₁kᵀ) − strength·softmax(q₂kᵀ))·v for pairs of query heads (2i, 2i+1).

    q (B, T, 2H, D), k (B, T, G, D), v (B, T, G, E), strength (B, T, H) -> (B, T, H, E)
    """
    groups = k.shape[2]
    paired = q.unflatten(2, (groups, -1, 2)).permute(0, 2, 3, 4, 1, 5)
    shares = strength.unflatten(2, (groups, -1)).permute(0, 2, 3, 1).unsqueeze(-1)
    out = _Difference.call(paired, k.transpose(1, 2), v.transpose(1, 2), shares, scale)
    gathered: Tensor = out.permute(0, 3, 1, 2, 4).flatten(2, 3)
    return gathered


class _Difference(CustomFunction):
    """q (B, G, R, 2, T, D), k (B, G, T, D), v (B, G, T, E), strength (B, G, R, T, 1) -> (B, G, R, T, E)."""

    @staticmethod
    def composite(q: Tensor, k: Tensor, v: Tensor, strength: Tensor, scale: float) -> Tensor:
        scores = scale * torch.einsum("bgrstd,bgud->bgrstu", q, k)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        first, second = torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1).unbind(3)
        return torch.einsum("bgrtu,bgue->bgrte", first - strength * second, v)

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, strength: Tensor, scale: float) -> Tensor:
        out = _token_first(strength.expand(*strength.shape[:-1], v.shape[-1]))
        keys, values, room = k.flatten(0, 1), v.flatten(0, 1), _Room(q)
        for rows, seen in _blocks(q.shape[-2]):
            _, p = _weights(q, keys, rows, seen, scale, room)
            w = _subtracted(p, strength[..., rows, :].flatten(0, 1), room)
            out[..., rows, :] = torch.bmm(w, values[:, seen]).view(out[..., rows, :].shape)
        return out

    @staticmethod
    def gradients(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (q, k, v, strength, _), grad, scale = ctx.saved_tensors, grads[0], ctx.others[-1]
        keys, values, room = k.flatten(0, 1), v.flatten(0, 1), _Room(q)
        to_q, to_strength = _token_first(q), torch.empty(strength.shape, dtype=q.dtype)
        to_k, to_v = torch.zeros_like(keys), torch.zeros_like(values)
        for rows, seen in _blocks(q.shape[-2]):
            share = strength[..., rows, :].flatten(0, 1)
            out = grad[..., rows, :].reshape(len(keys), -1, grad.shape[-1])
            block, p = _weights(q, keys, rows, seen, scale, room)
            w = _subtracted(p, share, room)
            to_v[:, seen].baddbmm_(w.transpose(1, 2), out)
            to_w = torch.bmm(out, values[:, seen].transpose(1, 2), out=w).view_as(p[:, :, 0])
            for one in p.unbind(2):
                moved = torch.mul(to_w, one, out=room.take(2, *to_w.shape))
                mean = moved.sum(dim=-1, keepdim=True)
                torch.addcmul(moved, one, mean, value=-1, out=one)
            to_strength[..., rows, :] = mean.neg().view(to_strength[..., rows, :].shape)
            to_scores = p.view(len(keys), -1, p.shape[-1])
            to_block = torch.bmm(to_scores, keys[:, seen]).mul_(scale).view(block.shape)
            for vectors in (block, to_block):  # the second softmax counts by its share, and is taken away
                vectors[:, :, 1].mul_(-share)
            to_q[..., rows, :] = to_block.view(to_q[..., rows, :].shape)
            to_k[:, seen].baddbmm_(to_scores.transpose(1, 2), block.view(len(keys), -1, block.shape[-1]))
        return to_q, to_k.view(k.shape), to_v.view(v.shape), to_strength, None


class _Room:
    """Memory that every block uses again: fresh memory costs more than what is computed in it."""

    def __init__(self, q: Tensor) -> None:
        batch, groups, each, _, length, size = q.shape
        rows = batch * groups * each * min(BLOCK, length)
        self.parts = [q.new_empty(rows * n) for n in (2 * length, length, length, 2 * size)]
        self.future = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=q.device).triu_(1)

    def take(self, part: int, *shape: int) -> Tensor:
        return self.parts[part][: math.prod(shape)].view(shape)


def _token_first(like: Tensor) -> Tensor:
    """Room for (B, …, T, D) in memory laid out (B, T, …, D), as the rest of the layer wants it."""
    order = [0, like.dim() - 2, *range(1, like.dim() - 2), like.dim() - 1]
    room = torch.empty([like.shape[i] for i in order], dtype=like.dtype, device=like.device)
    return room.permute(0, *range(2, like.dim() - 1), 1, like.dim() - 1)


def _blocks(length: int) -> Iterator[tuple[slice, slice]]:
    """Rows, and the keys they may see together."""
    for begin in range(0, length, BLOCK):
        end = min(begin + BLOCK, length)
        yield slice(begin, end), slice(0, end)


def _weights(
    q: Tensor, k: Tensor, rows: slice, seen: slice, scale: float, room: _Room
) -> tuple[Tensor, Tensor]:
    """A block's scaled queries (N, R, 2, rows, D) and its softmaxes (N, R, 2, rows, seen), N = B·G."""
    cut = q[..., rows, :]
    block = torch.mul(cut, scale, out=room.take(3, *cut.shape)).flatten(0, 1)
    count = block.shape[-2]
    flat = block.view(len(k), -1, q.shape[-1])
    scores = room.take(0, *flat.shape[:2], seen.stop)
    torch.bmm(flat, k[:, seen].transpose(1, 2), out=scores)
    scores = scores.view(*block.shape[:-1], -1)
    scores[..., rows.start :].masked_fill_(room.future[:count, :count], float("-inf"))
    return block, torch.softmax(scores, dim=-1, out=scores)


def _subtracted(p: Tensor, share: Tensor, room: _Room) -> Tensor:
    """p₁ − share·p₂ as (N, R·rows, seen)."""
    first, second = p[:, :, 0], p[:, :, 1]
    w = room.take(1, *first.shape)
    return torch.addcmul(first, second, share, value=-1, out=w).flatten(1, 2)
