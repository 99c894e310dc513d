"""The difference of two causal softmaxes over the same keys and values, blocked for the CPU cache.

The fused kernel would run twice as often as for one softmax. Both softmaxes share their keys and values, so
their weights are subtracted first: one matmul with the values instead of two, forward and backward. Query
rows are processed in blocks that fit the CPU cache, each with the keys up to its end. Only the inputs are
saved for the backward pass. `qkflow bench --ablate` measures the gain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from qkflow.attention.masks import Mask

BLOCK = 32  # query rows
MIN_SEQ_LEN = 128  # for shorter sequences there is nothing to skip


def supports(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> bool:
    """Whether to use this implementation: CPU training with a plain causal mask, not under a transform."""
    return (
        q.device.type == "cpu"
        and q.dtype in (torch.float32, torch.float64)
        and q.dtype == k.dtype == v.dtype
        and q.shape[1] == k.shape[1] >= MIN_SEQ_LEN
        and mask.causal
        and mask.allowed is None
        and dropout == 0
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


def softmax_difference(q: Tensor, k: Tensor, v: Tensor, strength: Tensor, scale: float) -> Tensor:
    """Return (softmax(q₁kᵀ) − strength·softmax(q₂kᵀ))·v for pairs of query heads (2i, 2i+1).

    q (B, T, 2H, D), k (B, T, G, D), v (B, T, G, E), strength (B, T, H) -> (B, T, H, E)
    """
    groups = k.shape[2]
    paired = q.unflatten(2, (groups, -1, 2)).permute(0, 2, 3, 4, 1, 5)
    strength = strength.unflatten(2, (groups, -1)).permute(0, 2, 3, 1).unsqueeze(-1)
    out: Tensor = _Difference.apply(paired, k.transpose(1, 2), v.transpose(1, 2), strength, scale)
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)


class _Difference(torch.autograd.Function):
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
        keys, values, buffers = k.flatten(0, 1), v.flatten(0, 1), _Buffers(q)
        for rows, visible in _blocks(q.shape[-2]):
            _, p = _weights(q, keys, rows, visible, scale, buffers)
            w = _subtracted(p, strength[..., rows, :].flatten(0, 1), buffers)
            out[..., rows, :] = torch.bmm(w, values[:, visible]).view(out[..., rows, :].shape)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:4])
        ctx.scale = inputs[4]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (q, k, v, strength), grad, scale = ctx.saved_tensors, grads[0], ctx.scale
        if torch.is_grad_enabled():  # double backward: differentiate the composition of regular operations
            inputs = [x.view_as(x) for x in (q, k, v, strength)]  # views: the inputs may depend on each other
            out = _Difference.composite(inputs[0], inputs[1], inputs[2], inputs[3], scale)
            return *torch.autograd.grad(out, inputs, grad, create_graph=True), None
        keys, values, buffers = k.flatten(0, 1), v.flatten(0, 1), _Buffers(q)
        to_q, to_strength = _token_first(q), torch.empty(strength.shape, dtype=q.dtype)
        to_k, to_v = torch.zeros_like(keys), torch.zeros_like(values)
        for rows, visible in _blocks(q.shape[-2]):
            share = strength[..., rows, :].flatten(0, 1)
            out = grad[..., rows, :].reshape(len(keys), -1, grad.shape[-1])
            block, p = _weights(q, keys, rows, visible, scale, buffers)
            w = _subtracted(p, share, buffers)
            to_v[:, visible].baddbmm_(w.transpose(1, 2), out)
            to_w = torch.bmm(out, values[:, visible].transpose(1, 2), out=w).view_as(p[:, :, 0])
            for one in p.unbind(2):
                moved = torch.mul(to_w, one, out=buffers.take(2, *to_w.shape))
                mean = moved.sum(dim=-1, keepdim=True)
                torch.addcmul(moved, one, mean, value=-1, out=one)
            to_strength[..., rows, :] = mean.neg().view(to_strength[..., rows, :].shape)
            to_scores = p.view(len(keys), -1, p.shape[-1])
            to_block = torch.bmm(to_scores, keys[:, visible]).mul_(scale).view(block.shape)
            for vectors in (block, to_block):  # the second softmax has the factor −strength
                vectors[:, :, 1].mul_(-share)
            to_q[..., rows, :] = to_block.view(to_q[..., rows, :].shape)
            to_k[:, visible].baddbmm_(to_scores.transpose(1, 2), block.view(len(keys), -1, block.shape[-1]))
        return to_q, to_k.view(k.shape), to_v.view(v.shape), to_strength, None


class _Buffers:
    """Buffers that every block reuses: allocation would cost more than the computation."""

    def __init__(self, q: Tensor) -> None:
        batch, groups, each, _, length, size = q.shape
        rows = batch * groups * each * min(BLOCK, length)
        self.parts = [q.new_empty(rows * n) for n in (2 * length, length, length, 2 * size)]
        self.future = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=q.device).triu_(1)

    def take(self, part: int, *shape: int) -> Tensor:
        return self.parts[part][: math.prod(shape)].view(shape)


def _token_first(like: Tensor) -> Tensor:
    """Return an empty (B, …, T, D) tensor with the memory layout (B, T, …, D)."""
    order = [0, like.dim() - 2, *range(1, like.dim() - 2), like.dim() - 1]
    buffers = torch.empty([like.shape[i] for i in order], dtype=like.dtype, device=like.device)
    return buffers.permute(0, *range(2, like.dim() - 1), 1, like.dim() - 1)


def _blocks(length: int) -> Iterator[tuple[slice, slice]]:
    """Yield query rows and the keys that any of them attends to."""
    for begin in range(0, length, BLOCK):
        end = min(begin + BLOCK, length)
        yield slice(begin, end), slice(0, end)


def _weights(
    q: Tensor, k: Tensor, rows: slice, visible: slice, scale: float, buffers: _Buffers
) -> tuple[Tensor, Tensor]:
    """Return scaled queries (N, R, 2, rows, D) and softmaxes (N, R, 2, rows, keys) of a block, N = B·G."""
    cut = q[..., rows, :]
    block = torch.mul(cut, scale, out=buffers.take(3, *cut.shape)).flatten(0, 1)
    count = block.shape[-2]
    flat = block.view(len(k), -1, q.shape[-1])
    scores = buffers.take(0, *flat.shape[:2], visible.stop)
    torch.bmm(flat, k[:, visible].transpose(1, 2), out=scores)
    scores = scores.view(*block.shape[:-1], -1)
    scores[..., rows.start :].masked_fill_(buffers.future[:count, :count], float("-inf"))
    return block, torch.softmax(scores, dim=-1, out=scores)


def _subtracted(p: Tensor, share: Tensor, buffers: _Buffers) -> Tensor:
    """Return p₁ − share·p₂ as (N, R·rows, keys)."""
    first, second = p[:, :, 0], p[:, :, 1]
    w = buffers.take(1, *first.shape)
    return torch.addcmul(first, second, share, value=-1, out=w).flatten(1, 2)
