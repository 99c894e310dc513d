"""Cross-entropy of a linear output layer without holding all logits.

The logits of a language model are its largest tensor: tokens × vocabulary. Here they exist for one chunk of
tokens at a time. The gradient of a chunk is computed at once, while its logits are still in the CPU cache, so
nothing of that size is saved for the backward pass or computed twice.

With E = exp(logits − max), s = its row sums and y the targets, the loss of a token is log s + max − logit_y,
and the gradient of its logits (E − s·onehot(y)) / s. The division by s is applied to the hidden states, which
are narrower than the logits. With a softcap, logits are c·tanh(z/c) of the products z, and the gradient is
multiplied by the slope 1 − (logits/c)².

`torch.nn.functional.linear_cross_entropy` (torch 2.13 and later) takes the same time and memory with the same
chunk size; it can replace this module when 2.13 is the oldest supported version.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from qkflow.attention.projections import is_autocast_enabled

CHUNK_SIZE = 512  # tokens: their logits fit the CPU cache, and matmuls still run at full speed
IGNORE_INDEX = -100
Reduction = Literal["mean", "sum"]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    reduction: Reduction = "mean",
    ignore_index: int = IGNORE_INDEX,
    chunk_size: int = CHUNK_SIZE,
    softcap: float | None = None,
) -> Tensor:
    """Return the cross-entropy of the logits `hidden @ weight.T` against `targets`.

    hidden      (…, dim), weight (V, dim), targets (…) of token ids; `ignore_index` is ignored
    reduction   mean over the counted tokens, or their sum
    chunk_size  tokens whose logits exist at one time
    softcap     c of the logits c·tanh(z/c); None: the logits are the products z
    """
    hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    if is_autocast_enabled(hidden):
        hidden, weight = (x.to(torch.get_autocast_dtype(hidden.device.type)) for x in (hidden, weight))
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        loss: Tensor = _ChunkedLinearCrossEntropy.apply(
            hidden, weight, targets, reduction, ignore_index, chunk_size, softcap
        )
        return loss
    return _chunked_loss_and_grads(
        hidden, weight, targets, reduction, ignore_index, chunk_size, softcap, (False, False)
    )[0]


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    reduction: Reduction = "mean",
    ignore_index: int = IGNORE_INDEX,
    softcap: float | None = None,
) -> Tensor:
    """Return the loss in the textbook form, with all logits at once."""
    logits = F.linear(hidden, weight).flatten(0, -2)
    exact = softcap_logits(logits.to(torch.promote_types(logits.dtype, torch.float32)), softcap)
    return F.cross_entropy(exact, targets.reshape(-1), reduction=reduction, ignore_index=ignore_index)


def softcap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """Return cap·tanh(logits/cap), or the logits without a cap."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        reduction: Reduction,
        ignore_index: int,
        chunk_size: int,
        softcap: float | None,
    ) -> Tensor:
        need = ctx.needs_input_grad[:2]
        loss, *gradients = _chunked_loss_and_grads(
            hidden, weight, targets, reduction, ignore_index, chunk_size, softcap, need
        )
        ctx.save_for_backward(*gradients)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            None if grad_hidden is None else grad_hidden * grad,
            None if grad_weight is None else (grad_weight * grad).to(ctx.weight_dtype),
            *(None,) * 5,
        )


def _chunked_loss_and_grads(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    reduction: Reduction,
    ignore_index: int,
    chunk_size: int,
    softcap: float | None,
    needs_grad: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the loss and the gradients of hidden and weight where they are needed."""
    exact = torch.promote_types(hidden.dtype, torch.float32)  # of sums and of the loss
    counted = (targets != ignore_index)[:, None]
    targets = targets[:, None].masked_fill(~counted, 0)
    shares = counted.to(exact)  # of each token in the loss
    if reduction == "mean":
        shares /= counted.sum().clamp(min=1)  # no counted token: zero loss
    grad_hidden = torch.empty_like(hidden) if needs_grad[0] else None
    grad_weight = torch.zeros_like(weight, dtype=exact) if needs_grad[1] else None
    total = torch.zeros((), dtype=exact, device=hidden.device)
    buffer = torch.empty(min(chunk_size, len(hidden)), len(weight), dtype=hidden.dtype, device=hidden.device)
    for start in range(0, len(hidden), chunk_size):
        rows = slice(start, start + chunk_size)
        h, target, share = hidden[rows], targets[rows], shares[rows]
        logits = torch.mm(h, weight.t(), out=buffer[: len(h)]).to(exact)
        slope = None
        if softcap is not None:
            tanh = logits.div_(softcap).tanh_()
            slope = 1 - tanh.square() if any(needs_grad) else None
            logits = tanh.mul_(softcap)
        top = logits.amax(dim=1, keepdim=True)
        expected = logits.gather(1, target)
        e = logits.sub_(top).exp_()
        norm = e.sum(dim=1, keepdim=True)
        # where(): an ignored token adds nothing even if its loss is not finite
        total += torch.where(counted[rows], (norm.log() + top - expected) * share, 0).sum()
        if grad_hidden is None and grad_weight is None:
            continue
        e = e.scatter_add_(1, target, -norm)
        e = (e if slope is None else e.mul_(slope)).to(hidden.dtype)
        share = share / norm
        if grad_hidden is not None:
            torch.mm(e, weight, out=grad_hidden[rows]).mul_(share)
        if grad_weight is not None:
            scaled = (h * share).to(hidden.dtype)
            if grad_weight.dtype == e.dtype:
                grad_weight.addmm_(e.t(), scaled)
            else:
                grad_weight += e.t() @ scaled
    return total, grad_hidden, grad_weight
