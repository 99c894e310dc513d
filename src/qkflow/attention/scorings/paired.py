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
            w = _subtract(p, strength[..., rows, :].flatten(0, 1), buffers)
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
        grad_q, grad_strength = _token_first(q), torch.empty(strength.shape, dtype=q.dtype)
        grad_k, grad_v = torch.zeros_like(keys), torch.zeros_like(values)
        for rows, visible in _blocks(q.shape[-2]):
            factor = strength[..., rows, :].flatten(0, 1)
            grad_out = grad[..., rows, :].reshape(len(keys), -1, grad.shape[-1])
            block, p = _weights(q, keys, rows, visible, scale, buffers)
            w = _subtract(p, factor, buffers)
            grad_v[:, visible].baddbmm_(w.transpose(1, 2), grad_out)
            grad_w = torch.bmm(grad_out, values[:, visible].transpose(1, 2), out=w).view_as(p[:, :, 0])
            for softmax in p.unbind(2):  # backward of both softmaxes, in place
                product = torch.mul(grad_w, softmax, out=buffers.take(2, *grad_w.shape))
                row_sum = product.sum(dim=-1, keepdim=True)
                torch.addcmul(product, softmax, row_sum, value=-1, out=softmax)
            grad_strength[..., rows, :] = row_sum.neg().view(grad_strength[..., rows, :].shape)
            grad_scores = p.view(len(keys), -1, p.shape[-1])
            grad_block = torch.bmm(grad_scores, keys[:, visible]).mul_(scale).view(block.shape)
            for vectors in (block, grad_block):  # the second softmax has the factor −strength
                vectors[:, :, 1].mul_(-factor)
            grad_q[..., rows, :] = grad_block.view(grad_q[..., rows, :].shape)
            queries = block.view(len(keys), -1, block.shape[-1])
            grad_k[:, visible].baddbmm_(grad_scores.transpose(1, 2), queries)
        return grad_q, grad_k.view(k.shape), grad_v.view(v.shape), grad_strength, None


class _Buffers:
    """Buffers that every block reuses: allocation would cost more than the computation."""

    def __init__(self, q: Tensor) -> None:
        batch, groups, group_size, _, length, head_dim = q.shape
        rows = batch * groups * group_size * min(BLOCK, length)
        self.parts = [q.new_empty(rows * n) for n in (2 * length, length, length, 2 * head_dim)]
        self.future = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=q.device).triu_(1)

    def take(self, part: int, *shape: int) -> Tensor:
        return self.parts[part][: math.prod(shape)].view(shape)


def _token_first(like: Tensor) -> Tensor:
    """Return an empty (B, …, T, D) tensor with the memory layout (B, T, …, D)."""
    order = [0, like.dim() - 2, *range(1, like.dim() - 2), like.dim() - 1]
    out = torch.empty([like.shape[i] for i in order], dtype=like.dtype, device=like.device)
    return out.permute(0, *range(2, like.dim() - 1), 1, like.dim() - 1)


def _blocks(length: int) -> Iterator[tuple[slice, slice]]:
    """Yield query rows and the keys that any of them attends to."""
    for begin in range(0, length, BLOCK):
        end = min(begin + BLOCK, length)
        yield slice(begin, end), slice(0, end)


def _weights(
    q: Tensor, k: Tensor, rows: slice, visible: slice, scale: float, buffers: _Buffers
) -> tuple[Tensor, Tensor]:
    """Return scaled queries (N, R, 2, rows, D) and softmaxes (N, R, 2, rows, keys) of a block, N = B·G."""
    q = q[..., rows, :]
    block = torch.mul(q, scale, out=buffers.take(3, *q.shape)).flatten(0, 1)
    n_rows = block.shape[-2]
    flat = block.view(len(k), -1, q.shape[-1])
    scores = buffers.take(0, *flat.shape[:2], visible.stop)
    torch.bmm(flat, k[:, visible].transpose(1, 2), out=scores)
    scores = scores.view(*block.shape[:-1], -1)
    scores[..., rows.start :].masked_fill_(buffers.future[:n_rows, :n_rows], float("-inf"))
    return block, torch.softmax(scores, dim=-1, out=scores)


def _subtract(p: Tensor, factor: Tensor, buffers: _Buffers) -> Tensor:
    """Return p₁ − factor·p₂ as (N, R·rows, keys)."""
    first, second = p[:, :, 0], p[:, :, 1]
    w = buffers.take(1, *first.shape)
    return torch.addcmul(first, second, factor, value=-1, out=w).flatten(1, 2)
