"""Cross-entropy that never holds all logits.

The logits of a language model are its largest tensor by far: tokens × vocabulary. Here they exist for a chunk of
tokens at a time. Each chunk's share of the gradient is computed at once, while its logits are still in the cache,
so that nothing of size tokens × vocabulary is kept for the backward pass or computed twice.

With E = exp(logits − max), s = its row sums and y the targets, a token's loss is log s + max − logit_y, and the
gradient with respect to its logits (E − s·onehot(y)) / s. Dividing by s is left to the narrow factors (the hidden
states), so that the wide matrix is passed over as little as possible.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 512  # tokens: their logits fit the cache, and the matrix products still run at full speed
IGNORE = -100


def cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = IGNORE, chunk: int = CHUNK
) -> Tensor:
    """Mean cross-entropy of `hidden @ weight.T` against `targets`.

    hidden   (…, width), weight (V, width), targets (…) of token ids; those equal to `ignore_index` do not count
    chunk    tokens whose logits exist at one time
    """
    hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    loss: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, targets, ignore_index, chunk)
    return loss


def cross_entropy_reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = IGNORE
) -> Tensor:
    """The textbook form, with all logits at once."""
    logits = F.linear(hidden, weight).flatten(0, -2)
    return F.cross_entropy(logits.float() if logits.dtype.itemsize < 4 else logits, targets.reshape(-1),
                           ignore_index=ignore_index)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, chunk: int
    ) -> Tensor:
        exact = torch.promote_types(hidden.dtype, torch.float32)  # of sums and of the loss
        counted = targets != ignore_index
        targets = targets.clamp(min=0)
        per_token = counted.to(exact) / counted.sum()
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if need_weight else None
        total = torch.zeros((), dtype=exact, device=hidden.device)
        buffer = torch.empty(min(chunk, len(hidden)), len(weight), dtype=hidden.dtype, device=hidden.device)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            h, target, share = hidden[rows], targets[rows, None], per_token[rows, None]
            logits = torch.mm(h, weight.t(), out=buffer[: len(h)]).to(exact)
            top = logits.amax(dim=1, keepdim=True)
            expected = logits.gather(1, target)
            e = logits.sub_(top).exp_()
            norm = e.sum(dim=1, keepdim=True)
            # where(): an ignored row counts as zero even if its loss is not finite
            total += torch.where(counted[rows, None], (norm.log() + top - expected) * share, 0).sum()
            if not (need_hidden or need_weight):
                continue
            e.scatter_add_(1, target, -norm)
            share = share / norm
            e = e.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(e, weight, out=grad_hidden[rows]).mul_(share)
            if grad_weight is not None:
                scaled = (h * share).to(hidden.dtype)
                if grad_weight.dtype == e.dtype:
                    grad_weight.addmm_(e.t(), scaled)
                else:
                    grad_weight += e.t() @ scaled
        ctx.save_for_backward(*(g for g in (grad_hidden, grad_weight) if g is not None))
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        saved = list(ctx.saved_tensors)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        hidden = saved.pop(0) * grad if need_hidden else None
        weight = (saved.pop(0) * grad).to(ctx.weight_dtype) if need_weight else None
        return hidden, weight, None, None, None
