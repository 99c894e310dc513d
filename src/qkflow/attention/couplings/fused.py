"""The passes over q and k that a low-rank coupling makes, as few as possible, with their gradients by hand.

What a coupling costs is memory traffic: every D-wide pass over q or k counts. Here each result is written
once and the low-rank part is added to it in place; every product has its small matrix on the left and the
N = B·T tokens last, (ρ × D)·(D × N), which the batched product likes best by far; and the steps are
recomputed in the backward pass instead of kept.

Under autocast tokens come in low precision and weights do not; the tokens' precision is the one that is
computed in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from qkflow.attention.couplings.base import add_drift
from qkflow.attention.couplings.trajectory import Path, Rule, adjoint, walk
from qkflow.autograd import CustomFunction

if TYPE_CHECKING:
    from qkflow.attention.couplings.latent import Weights

Grads = tuple[Tensor | None, ...]


def couple(q: Tensor, k: Tensor, weights: Weights, folded: bool) -> tuple[Tensor, Tensor]:
    """(q, k) of shapes (B, T, H, D), (B, T, G, D) at the end of the trajectory, but for what b2 adds."""
    w = weights.to(q.dtype)
    out: tuple[Tensor, Tensor] = _Couple.call(
        q, k, w.total, w.w1, w.rows, w.mix, w.exit_k, w.exit_q, w.b1, w.pull, w.rule, folded
    )
    return out


def add_low_rank(base: Tensor, coefficients: Tensor, rows: Tensor) -> Tensor:
    """base (B, T, H, D) + coefficientsᵀ·rows, for coefficients (H, ρ, N) and rows (H, ρ, D)."""
    out: Tensor = _AddLowRank.call(base, coefficients.to(base.dtype), rows.to(base.dtype))
    return out


def enter(x: Tensor, w1: Tensor) -> Tensor:
    """W1·x of (B, T, H, D) tokens for W1 (H, ρ, D): latents (H, ρ, N)."""
    out: Tensor = _Enter.call(x, w1.to(x.dtype))
    return out


def by_head(x: Tensor) -> Tensor:
    """(B, T, H, D) -> (H, N, D), a view where x is contiguous."""
    return x.reshape(-1, *x.shape[2:]).transpose(0, 1)


def plain_product(latent: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """latentᵀ·rows, laid out (B, T, H, D) like the tokens it is for."""
    return torch.bmm(latent.transpose(1, 2), rows).transpose(0, 1).reshape(like.shape)


def _added(base: Tensor, coefficients: Tensor, rows: Tensor) -> Tensor:
    out = base.clone(memory_format=torch.contiguous_format)
    by_head(out).baddbmm_(coefficients.transpose(1, 2), rows)
    return out


def _per_query(area: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Give every query head its group's: (G, …) -> (H, …)."""
    return area.repeat_interleave(q.shape[2] // k.shape[2], dim=0)


def _per_group(x: Tensor, group: int) -> Tensor:
    """Sum over the query heads of each group: (H, …) -> (G, …)."""
    return x if group == 1 else x.unflatten(0, (-1, group)).sum(1)


class _Enter(CustomFunction):
    @staticmethod
    def composite(x: Tensor, w1: Tensor) -> Tensor:
        return torch.bmm(w1, by_head(x).transpose(1, 2))

    forward = composite

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Grads:
        x, w1 = ctx.saved_tensors
        return plain_product(grads[0], w1, x), torch.bmm(grads[0], by_head(x))


class _AddLowRank(CustomFunction):
    @staticmethod
    def composite(base: Tensor, coefficients: Tensor, rows: Tensor) -> Tensor:
        return base + plain_product(coefficients, rows, base)

    @staticmethod
    def forward(base: Tensor, coefficients: Tensor, rows: Tensor) -> Tensor:
        return _added(base, coefficients, rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Grads:
        coefficients, rows = ctx.saved_tensors
        heads = by_head(grads[0])
        return grads[0], torch.bmm(rows, heads.transpose(1, 2)), torch.bmm(coefficients, heads)


class _Given(NamedTuple):
    """What `_Couple` takes besides q and k: parts of `Weights`, and whether q has drifted already."""

    total: Tensor
    w1: Tensor
    rows: Tensor
    mix: Tensor
    exit_k: Tensor
    exit_q: Tensor
    b1: Tensor | None
    pull: Tensor | None
    rule: Rule
    folded: bool

    def entries(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """u = W1·q + b1 and, where it is needed, w = W1·k, both (G, ρ, N)."""
        per_query = self.w1.view(q.shape[2], -1, self.w1.shape[2])
        u = torch.bmm(per_query, by_head(q).transpose(1, 2)).view(*self.w1.shape[:2], -1)
        w = None
        if self.folded or self.rule.moves:
            w = torch.bmm(self.w1, by_head(k).transpose(1, 2))
        if self.folded and w is not None:
            u = u - self.rule.steps * self.rows * w
        return (u if self.b1 is None else u + self.b1), w

    def path(self, u: Tensor, w: Tensor | None) -> Path:
        return walk(self.rule, u, self.rows * w if w is not None else None, self.mix, self.pull)


class _Couple(CustomFunction):
    n_results = first_saved_output = 2

    @staticmethod
    def composite(q: Tensor, k: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        g = _Given(*given)
        path = g.path(*g.entries(q, k))
        q_out = q if g.folded else add_drift(q, k, g.total)
        if path.area is not None:
            q_out = q_out + plain_product(_per_query(path.area, q, k), g.exit_q, q)
        return q_out, k + plain_product(path.beta, g.exit_k, k)

    @staticmethod
    def forward(q: Tensor, k: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        g = _Given(*given)
        path = g.path(*g.entries(q, k))
        q_out = q.clone(memory_format=torch.contiguous_format) if g.folded else add_drift(q, k, g.total)
        q_out = q_out.contiguous()  # for `by_head` to be a view of it
        if path.area is not None:
            by_head(q_out).baddbmm_(_per_query(path.area, q, k).transpose(1, 2), g.exit_q)
        return q_out, _added(k, path.beta, g.exit_k)

    @staticmethod
    def gradients(ctx: Any, *grads: Any) -> Grads:
        q, k, *weights, _, _ = ctx.saved_tensors
        g = _Given(*weights, *ctx.others[-2:])
        to_q, to_k = (grad.contiguous() for grad in grads)
        q_rows, k_rows = by_head(to_q), by_head(to_k)
        u, w = g.entries(q, k)
        path = g.path(u, w)

        to_beta = torch.bmm(g.exit_k, k_rows.transpose(1, 2))
        to_exit_k = torch.bmm(path.beta, k_rows)
        to_area = to_exit_q = None
        if path.area is not None:
            to_area = _per_group(torch.bmm(g.exit_q, q_rows.transpose(1, 2)), q.shape[2] // k.shape[2])
            to_exit_q = torch.bmm(_per_query(path.area, q, k), q_rows)
        back = adjoint(g.rule, path, u, g.mix, g.pull, to_beta, to_area)

        per_query = g.w1.view(q.shape[2], -1, g.w1.shape[2])
        to_u = back.u.reshape(*per_query.shape[:2], back.u.shape[-1])
        to_w1 = torch.bmm(to_u, by_head(q)).view_as(g.w1)
        to_rows = None
        grad_q = _added(to_q, to_u, per_query)
        grad_k, to_total = _undrift(to_q, to_k, k, g.total, g.folded)
        if w is not None:
            slope = back.drift if back.drift is not None else torch.zeros_like(w)
            if g.folded:
                slope = slope - g.rule.steps * back.u
            to_rows = (slope * w).sum(-1, keepdim=True)
            to_w = g.rows * slope
            to_w1 = to_w1 + torch.bmm(to_w, by_head(k))
            by_head(grad_k).baddbmm_(to_w.transpose(1, 2), g.w1)
        to_b1 = None if g.b1 is None else back.u.sum(-1, keepdim=True)
        to_weights = (to_total, to_w1, to_rows, back.mix, to_exit_k, to_exit_q, to_b1, back.pull)
        return grad_q, grad_k, *to_weights, None, None


def _undrift(
    to_q: Tensor, to_k: Tensor, k: Tensor, total: Tensor, folded: bool
) -> tuple[Tensor, Tensor | None]:
    """Back through q + total_h·k: what reaches k, in a tensor of its own, and what reaches the amounts."""
    if folded:
        return to_k.clone(), None
    group = to_q.shape[2] // k.shape[2]
    if group == 1:
        return torch.addcmul(to_k, to_q, total[:, None]), (to_q * k).sum((0, 1, 3))
    grouped = to_q.unflatten(2, (-1, group))
    amounts = total.view(-1, group, 1)
    to_total = (grouped * k.unsqueeze(3)).sum((0, 1, 4)).flatten()
    return to_k + (grouped * amounts).sum(3), to_total
