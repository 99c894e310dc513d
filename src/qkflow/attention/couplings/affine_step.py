"""One step of the affine coupling in few passes over memory and few calls, its gradients by hand.

Each half lets a source (the queries, then the moved keys) speak to a target:

    latent = silu(W1·source + b1) ; target ← target⊙exp(bound·tanh(s)) + t ; (s, t) = W2·latent + b2

Shapes are those of `fused`: latents (networks, r, N) with the N tokens last, and what all networks that speak
to one target say is one product. A latent that is always one carries b2. What is D wide is worked on head
by head, (heads, N, D), where a batched product is one call; tokens are put first again at the end.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qkflow.attention.couplings.base import HeadNetworks
from qkflow.attention.couplings.fused import Grads, by_head, plain_product
from qkflow.autograd import CustomFunction


class Network(NamedTuple):
    """W1 (H, r, D), W2 (H, 2D, r), biases (H, r) and (H, 2D) or None: one network a query head."""

    w1: Tensor
    w2: Tensor
    b1: Tensor | None
    b2: Tensor | None

    @classmethod
    def of(cls, networks: HeadNetworks, dtype: torch.dtype) -> Network:
        parts = (networks.w1, networks.w2, networks.b1, networks.b2)
        return cls(*(None if part is None else networks.per_head(part).to(dtype) for part in parts))  # type: ignore[arg-type]

    def listen(self, source: Tensor) -> Tensor:
        """u = W1·source + b1 (H, r, N) for a source (heads, N, D)."""
        count, hidden, size = self.w1.shape
        u = torch.bmm(self.w1.reshape(len(source), -1, size), source.transpose(1, 2)).view(count, hidden, -1)
        return u if self.b1 is None else u + self.b1.unsqueeze(-1)

    def latent(self, u: Tensor, targets: int) -> Tensor:
        """(targets, ρ, N)."""
        latent = F.silu(u)
        if self.b2 is not None:
            latent = torch.cat((latent, torch.ones_like(u[:, :1])), dim=1)
        return latent.view(targets, latent.shape[0] * latent.shape[1] // targets, u.shape[-1])

    def rows(self, targets: int) -> Tensor:
        """What latents say, s beside t (targets, ρ, 2D): a target hears the mean of its networks."""
        rows = self.w2.transpose(1, 2)
        if self.b2 is not None:
            rows = torch.cat((rows, self.b2.unsqueeze(1)), dim=1)
        count = len(rows)
        if count == targets:
            return rows
        return rows.reshape(targets, -1, rows.shape[-1]) * (targets / count)


def affine_step(
    q: Tensor, k: Tensor, from_query: Network, from_key: Network, bound: float
) -> tuple[Tensor, Tensor]:
    """k ← k⊙exp(s₁(q)) + t₁(q) ; q ← q⊙exp(s₂(k)) + t₂(k)."""
    out: tuple[Tensor, Tensor] = _Step.call(q, k, *from_query, *from_key, bound)
    return out


class _Step(CustomFunction):
    n_results = 2
    first_saved_output = 1  # the moved keys, and `_Half` of both halves

    @staticmethod
    def composite(q: Tensor, k: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        from_query, from_key, bound = _read(given)
        k = _plain_half(q, k, from_query, bound)
        return _plain_half(k, q, from_key, bound), k

    @staticmethod
    def forward(q: Tensor, k: Tensor, *given: Any) -> tuple[Tensor, ...]:
        from_query, from_key, bound = _read(given)
        k, first = _half(q, k, from_query, bound)
        q, second = _half(k, q, from_key, bound)
        return q, k, *first, *second

    @staticmethod
    def gradients(ctx: Any, *grads: Any) -> Grads:
        saved = ctx.saved_tensors  # once: checkpointing allows no more
        q, k, *weights, _, moved = saved[:12]
        from_query, from_key, bound = _read((*weights, ctx.others[-1]))
        first, second = _Half(*saved[12:16]), _Half(*saved[16:])
        to_q, to_k = (
            by_head(torch.zeros_like(x) if grad is None else grad)
            for x, grad in zip((q, k), grads, strict=False)
        )
        queries = by_head(q)
        to_q, to_u, *to_w2 = second.back(queries, from_key, bound, to_q)
        to_k = to_k.clone(memory_format=torch.contiguous_format)  # what arrived is not ours to change
        to_w1 = _listen_back(by_head(moved), from_key, to_u, to_k)
        to_from_key = to_w1[0], to_w2[0], to_w1[1], to_w2[1]
        to_k, to_u, *to_w2 = first.back(by_head(k), from_query, bound, to_k)
        to_w1 = _listen_back(queries, from_query, to_u, to_q)
        to_from_query = to_w1[0], to_w2[0], to_w1[1], to_w2[1]
        return _tokens_first(to_q, q), _tokens_first(to_k, k), *to_from_query, *to_from_key, None


def _read(given: tuple[Any, ...]) -> tuple[Network, Network, float]:
    return Network(*given[:4]), Network(*given[4:8]), given[8]


def _plain_half(source: Tensor, target: Tensor, network: Network, bound: float) -> Tensor:
    latent = network.latent(network.listen(by_head(source)), target.shape[2])
    s, t = (plain_product(latent, part, target) for part in network.rows(target.shape[2]).chunk(2, dim=-1))
    return target * torch.exp(bound * torch.tanh(s)) + t


class _Half(NamedTuple):
    """What one half keeps for its gradients; gate = sigmoid(2s) (heads, N, D)."""

    u: Tensor
    latent: Tensor
    rows: Tensor
    gate: Tensor

    def back(
        self, target: Tensor, network: Network, bound: float, to_out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """What reaches the target, u, W2 and b2."""
        count, hidden, tokens = self.u.shape
        scale, shift = self.rows.chunk(2, dim=-1)
        to_target = _stretch(self.gate, bound).mul_(to_out)
        to_s = torch.mul(to_target, target).mul_(self.gate)
        to_s = to_s.addcmul_(to_s, self.gate, value=-1)  # · sigmoid'
        slope = 4 * bound  # of bound·tanh(s) in s, beside sigmoid'
        to_latent = torch.bmm(shift, to_out.transpose(1, 2))
        to_latent.baddbmm_(scale, to_s.transpose(1, 2), alpha=slope)
        spoken = hidden + (network.b2 is not None)
        to_u = torch.ops.aten.silu_backward(to_latent.view(count, spoken, tokens)[:, :hidden], self.u)
        share = len(target) / count
        to_scale = torch.bmm(self.latent, to_s).mul_(share * slope)
        to_shift = torch.bmm(self.latent, to_out)
        to_rows = torch.cat((to_scale, to_shift if share == 1 else to_shift.mul_(share)), dim=-1)
        to_rows = to_rows.view(count, -1, to_rows.shape[-1])
        to_b2 = None if network.b2 is None else to_rows[:, -1]
        return to_target, to_u, to_rows[:, :hidden].transpose(1, 2), to_b2


def _half(source: Tensor, target: Tensor, network: Network, bound: float) -> tuple[Tensor, _Half]:
    heads = target.shape[2]
    u = network.listen(by_head(source))
    latent, rows = network.latent(u, heads), network.rows(heads)
    scale, shift = rows.chunk(2, dim=-1)
    by_token = latent.transpose(1, 2)
    gate = torch.bmm(by_token, 2 * scale).sigmoid()  # not in place: checkpointing may have kept a product
    out = torch.empty_like(target, memory_format=torch.contiguous_format)
    t = torch.bmm(by_token, shift)
    torch.addcmul(t, _stretch(gate, bound), by_head(target), out=by_head(out))
    return out, _Half(u, latent, rows, gate)


def _listen_back(
    source: Tensor, network: Network, to_u: Tensor, to_source: Tensor
) -> tuple[Tensor, Tensor | None]:
    """What reaches W1 and b1; what reaches the source is added to what has reached it already."""
    w1 = network.w1.reshape(len(source), -1, source.shape[-1])
    to_latents = to_u.reshape(*w1.shape[:2], to_u.shape[-1])
    to_source.baddbmm_(to_latents.transpose(1, 2), w1)
    to_w1 = torch.bmm(to_latents, source).view(network.w1.shape)
    return to_w1, None if network.b1 is None else to_u.sum(-1)


def _stretch(gate: Tensor, bound: float) -> Tensor:
    """exp(bound·tanh(s)) for gate = sigmoid(2s), a third of tanh's time; powers of two take half of exp's."""
    bound /= math.log(2)
    return torch.rsub(gate, -bound, alpha=-2 * bound).exp2_()


def _tokens_first(x: Tensor, like: Tensor) -> Tensor:
    """(H, N, D) -> (B, T, H, D), contiguous."""
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    by_head(out).copy_(x)
    return out
