"""The passes over q and k that a low-rank coupling makes, as few as possible, with their gradients by hand.

What a coupling costs is memory traffic: every D-wide pass over q or k counts. Here each result is written
once and the low-rank part is added to it in place; every product has its small matrix on the left and the
N = B·T tokens last, (ρ × D)·(D × N), which the batched product likes best by far; and the steps are
recomputed in the backward pass instead of kept.

A compiler makes its own passes, so it is shown the same in plain operations. Under autocast tokens come in
low precision and weights do not; the tokens' precision is the one that is computed in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qkflow.attention.couplings.base import add_drift
from qkflow.attention.couplings.trajectory import Rule, adjoint, walk
from qkflow.by_hand import ByHand

if TYPE_CHECKING:
    from qkflow.attention.couplings.latent import Weights

Grads = tuple[Tensor | None, ...]


def couple(q: Tensor, k: Tensor, weights: Weights, folded: bool) -> tuple[Tensor, Tensor]:
    """(q, k) of shapes (B, T, H, D), (B, T, G, D) at the end of the trajectory, but for what b2 adds."""
    w = weights.to(q.dtype)
    if torch.compiler.is_compiling():
        u, key_latent = _entries(q, k, w.w1, w.b1, w.rows, w.rule, folded)
        path = walk(w.rule, u, None if key_latent is None else w.rows * key_latent, w.mix, w.pull)
        q_out = q if folded else add_drift(q, k, w.total)
        if path.area is not None:
            area = path.area.repeat_interleave(q.shape[2] // k.shape[2], dim=0)
            q_out = add_low_rank(q_out, area, w.exit_q)
        return q_out, add_low_rank(k, path.beta, w.exit_k)
    out: tuple[Tensor, Tensor] = _Couple.call(
        q, k, w.total, w.w1, w.rows, w.mix, w.exit_k, w.exit_q, w.b1, w.pull, w.rule, folded
    )
    return out


def add_low_rank(base: Tensor, coefficients: Tensor, rows: Tensor) -> Tensor:
    """base (B, T, H, D) + coefficientsᵀ·rows, for coefficients (H, ρ, N) and rows (H, ρ, D)."""
    coefficients, rows = coefficients.to(base.dtype), rows.to(base.dtype)
    if torch.compiler.is_compiling():
        return base + _plain_product(coefficients, rows, base)
    out: Tensor = _AddLowRank.call(base, coefficients, rows)
    return out


def enter(x: Tensor, w1: Tensor) -> Tensor:
    """W1·x of (B, T, H, D) tokens for W1 (H, ρ, D): latents (H, ρ, N)."""
    w1 = w1.to(x.dtype)
    if torch.compiler.is_compiling():
        return torch.bmm(w1, _by_head(x).transpose(1, 2))
    out: Tensor = _Enter.call(x, w1)
    return out


def scale_and_shift(x: Tensor, latent: Tensor, scale: Tensor, shift: Tensor, bound: float) -> Tensor:
    """x⊙exp(bound·tanh(s)) + t, with s and t (B, T, H, D) = latentᵀ·scale and latentᵀ·shift.

    latent is (H, ρ, N), scale and shift are (H, ρ, D).
    """
    latent, scale, shift = (t.to(x.dtype) for t in (latent, scale, shift))
    if torch.compiler.is_compiling():
        stretch = torch.exp(bound * torch.tanh(_plain_product(latent, scale, x)))
        return x * stretch + _plain_product(latent, shift, x)
    # tanh(s) = 2·sigmoid(2s) − 1 takes a third of the time; the inner 2 goes into the small matrix
    out: Tensor = _ScaleAndShift.call(x, latent, 2 * scale, shift, bound)[0]
    return out


def _by_head(x: Tensor) -> Tensor:
    """(B, T, H, D) -> (H, N, D), a view where x is contiguous."""
    return x.reshape(-1, *x.shape[2:]).transpose(0, 1)


def _plain_product(latent: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    return torch.bmm(latent.transpose(1, 2), rows).transpose(0, 1).reshape(like.shape)


def _added(base: Tensor, coefficients: Tensor, rows: Tensor) -> Tensor:
    out = base.clone(memory_format=torch.contiguous_format)
    _by_head(out).baddbmm_(coefficients.transpose(1, 2), rows)
    return out


def _per_group(x: Tensor, group: int) -> Tensor:
    """Sum over the query heads of each group: (H, …) -> (G, …)."""
    return x if group == 1 else x.unflatten(0, (-1, group)).sum(1)


def _product(latent: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """latentᵀ·rows, laid out (B, T, H, D) like the tokens it is for."""
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    _by_head(out).baddbmm_(latent.transpose(1, 2), rows, beta=0)
    return out


class _Enter(ByHand):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w1: Tensor) -> Tensor:
        return torch.bmm(w1, _by_head(x).transpose(1, 2))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        x, w1 = ctx.saved_tensors
        return _product(grads[0], w1, x), torch.bmm(grads[0], _by_head(x))


class _ScaleAndShift(ByHand):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, latent: Tensor, twice: Tensor, shift: Tensor, bound: float
    ) -> tuple[Tensor, Tensor]:
        gate = torch.sigmoid_(_product(latent, twice, x))
        out = _stretch(gate, bound).mul_(x)
        _by_head(out).baddbmm_(latent.transpose(1, 2), shift)
        return out, gate

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, latent, twice, shift, ctx.bound = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, latent, twice, shift, output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        x, latent, twice, shift, gate = ctx.saved_tensors
        to_out = grads[0].contiguous()
        to_x = _stretch(gate, ctx.bound).mul_(to_out)
        to_scale = (to_x * x).mul_(gate)
        to_scale.addcmul_(to_scale, gate, value=-1)  # · sigmoid'
        scale_rows, shift_rows = _by_head(to_scale), _by_head(to_out)
        factor = 2 * ctx.bound  # between tanh and sigmoid
        to_latent = torch.bmm(shift, shift_rows.transpose(1, 2))
        to_latent.baddbmm_(twice, scale_rows.transpose(1, 2), alpha=factor)
        return to_x, to_latent, factor * torch.bmm(latent, scale_rows), torch.bmm(latent, shift_rows), None


def _stretch(gate: Tensor, bound: float) -> Tensor:
    """exp(bound·tanh(s)) for gate = sigmoid(2s)."""
    return (gate - 0.5).mul_(2 * bound).exp_()


class _AddLowRank(ByHand):
    generate_vmap_rule = True

    @staticmethod
    def forward(base: Tensor, coefficients: Tensor, rows: Tensor) -> Tensor:
        return _added(base, coefficients, rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        coefficients, rows = ctx.saved_tensors
        heads = _by_head(grads[0])
        return grads[0], torch.bmm(rows, heads.transpose(1, 2)), torch.bmm(coefficients, heads)


def _entries(
    q: Tensor, k: Tensor, w1: Tensor, b1: Tensor | None, rows: Tensor, rule: Rule, folded: bool
) -> tuple[Tensor, Tensor | None]:
    """u = W1·q + b1 and, where it is needed, w = W1·k, both (G, ρ, N)."""
    per_query = w1.view(q.shape[2], -1, w1.shape[2])
    u = torch.bmm(per_query, _by_head(q).transpose(1, 2)).view(*w1.shape[:2], -1)
    w = None
    if folded or rule.moves:
        w = torch.bmm(w1, _by_head(k).transpose(1, 2))
    if folded and w is not None:
        u = u - rule.steps * rows * w
    return (u if b1 is None else u + b1), w


class _Couple(ByHand):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        total: Tensor,
        w1: Tensor,
        rows: Tensor,
        mix: Tensor,
        exit_k: Tensor,
        exit_q: Tensor,
        b1: Tensor | None,
        pull: Tensor | None,
        rule: Rule,
        folded: bool,
    ) -> tuple[Tensor, Tensor]:
        u, w = _entries(q, k, w1, b1, rows, rule, folded)
        path = walk(rule, u, rows * w if w is not None else None, mix, pull)
        q_out = q.clone() if folded else add_drift(q, k, total).contiguous()
        if path.area is not None:
            area = path.area.repeat_interleave(q.shape[2] // k.shape[2], dim=0)
            _by_head(q_out).baddbmm_(area.transpose(1, 2), exit_q)
        return q_out, _added(k, path.beta, exit_k)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.rule, ctx.folded = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        q, k, total, w1, rows, mix, exit_k, exit_q, b1, pull = ctx.saved_tensors
        rule, folded, group = ctx.rule, ctx.folded, q.shape[2] // k.shape[2]
        to_q, to_k = (g.contiguous() for g in grads)
        q_rows, k_rows = _by_head(to_q), _by_head(to_k)
        u, w = _entries(q, k, w1, b1, rows, rule, folded)
        path = walk(rule, u, rows * w if w is not None else None, mix, pull)

        to_beta = torch.bmm(exit_k, k_rows.transpose(1, 2))
        to_exit_k = torch.bmm(path.beta, k_rows)
        to_area = to_exit_q = None
        if path.area is not None:
            to_area = _per_group(torch.bmm(exit_q, q_rows.transpose(1, 2)), group)
            to_exit_q = torch.bmm(path.area.repeat_interleave(group, dim=0), q_rows)
        back = adjoint(rule, path, u, mix, pull, to_beta, to_area)

        per_query = w1.view(q.shape[2], -1, w1.shape[2])
        to_u = back.u.reshape(q.shape[2], -1, back.u.shape[-1])
        to_w1 = torch.bmm(to_u, _by_head(q)).view_as(w1)
        to_rows = None
        grad_q = _added(to_q, to_u, per_query)
        grad_k, to_total = _undrift(to_q, to_k, k, total, group, folded)
        if w is not None:
            slope = back.drift if back.drift is not None else torch.zeros_like(w)
            if folded:
                slope = slope - rule.steps * back.u
            to_rows = (slope * w).sum(-1, keepdim=True)
            to_w = rows * slope
            to_w1 = to_w1 + torch.bmm(to_w, _by_head(k))
            _by_head(grad_k).baddbmm_(to_w.transpose(1, 2), w1)
        to_b1 = None if b1 is None else back.u.sum(-1, keepdim=True)
        to_weights = (to_total, to_w1, to_rows, back.mix, to_exit_k, to_exit_q, to_b1, back.pull)
        return grad_q, grad_k, *to_weights, None, None


def _undrift(
    to_q: Tensor, to_k: Tensor, k: Tensor, total: Tensor, group: int, folded: bool
) -> tuple[Tensor, Tensor | None]:
    """Back through q + total_h·k: what reaches k, in a tensor of its own, and what reaches the amounts."""
    if folded:
        return to_k.clone(), None
    if group == 1:
        return torch.addcmul(to_k, to_q, total[:, None]), (to_q * k).sum((0, 1, 3))
    grouped = to_q.unflatten(2, (-1, group))
    amounts = total.view(-1, group, 1)
    to_total = (grouped * k.unsqueeze(3)).sum((0, 1, 4)).flatten()
    return to_k + (grouped * amounts).sum(3), to_total
