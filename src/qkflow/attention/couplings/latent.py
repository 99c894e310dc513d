"""The exact cheap trajectory: euler and leapfrog in r dimensions a head instead of D.

The force f(q) = W2·σ(W1·q + b1) + b2 has its range in span(W2), and the drift q += Δk is linear. So after
any number of steps

    q_n = q + nΔ·k + Δ·W2'·A      k_n = k + W2'·β

where β sums the kicks σ(u), A sums β over the drifts, and u = W1·q + b1, all that σ needs, is itself

    u_j = u_0 + jΔ·w_0 + Δ·(W1·W2')·A_j        with w_0 = W1·k.

One entry (W1·q, W1·k), n steps on r numbers a head, one exit: O(D·r + n·r²) instead of O(n·D·r), with no
D-wide intermediate, equal to the textbook integrator up to rounding.

What costs is memory traffic. When the projections are at hand (`from_input`), q + nΔ·k comes out of one
product with W_Q + nΔ·W_K, and the latents out of one with W1·W_Q and W1·W_K: no pass over q or k at all,
and neither has to be kept for the backward pass.

Grouped heads share a key, so a group of R query heads shares one latent space of R·r dimensions:
W2' = [Δ_h·W2_h / R] side by side. Latents are laid out (G, R·r, N) with the N = B·T tokens last: small
matrices multiply from the left, which the batched product likes best by far.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from qkflow.attention.circuits import FactorisedQK
from qkflow.attention.couplings.base import Coupling, add_drift
from qkflow.attention.couplings.trajectory import Scheme, trajectory
from qkflow.attention.heads import Heads


@dataclass(frozen=True)
class Force:
    """f of every query head: W1 (H, r, D), W2 (H, D, r), biases (H, r) and (H, D) or None."""

    w1: Tensor
    w2: Tensor
    b1: Tensor | None
    b2: Tensor | None
    activation: Literal["silu", "sigmoid"]


@dataclass(frozen=True)
class Weights:
    """Everything the trajectory needs that depends on parameters alone."""

    total: Tensor  # nΔ (H,)
    w1: Tensor  # (G, R·r, D)
    rows: Tensor  # Δ of each latent row (G, R·r, 1)
    mix: Tensor  # Δ·(W1·W2') (G, R·r, R·r)
    exit_k: Tensor  # W2'ᵀ (G, R·r, D)
    exit_q: Tensor  # Δ·W2'ᵀ (H, R·r, D)
    b1: Tensor | None  # (G, R·r, 1)
    bias: Tensor | None  # what b2 adds to a key per kick (G, D)
    pull: Tensor | None  # what that does to u per drift (G, R·r, 1)
    projection: Tensor | None = None  # rows: W_Q + nΔ·W_K, then the latents' (inference only)
    projection_bias: Tensor | None = None


class LatentCoupling(Coupling):
    """What euler and leapfrog share: a force, a step size, and the trajectory in latent space."""

    scheme: Scheme
    steps: int
    folded: bool  # q arrives as q + nΔk: the drift sits in the projection

    def force(self) -> Force:
        raise NotImplementedError

    def delta(self) -> Tensor:
        """Δ of every query head (H,)."""
        raise NotImplementedError

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        heads, weights = self.heads, self._weights()
        q_heads, k_heads = _by_head(q), _by_head(k)
        w1 = weights.w1.view(heads.queries, -1, heads.size)
        u = torch.bmm(w1, q_heads.transpose(1, 2)).view(heads.keys, weights.w1.shape[1], -1)
        w = None
        if self.folded or self._needs_key_latent():
            w = torch.bmm(weights.w1, k_heads.transpose(1, 2))
        if self.folded and w is not None:
            u = u - self.steps * weights.rows * w
        drifted = q if self.folded else add_drift(q, k, weights.total)
        return self._finish(drifted, k, u, w, weights)

    def from_input(self, x: Tensor, qk: FactorisedQK) -> tuple[Tensor, Tensor]:
        """The coupled (q, k) of tokens x (B, T, width), straight from the projections' weights."""
        if self.folded:
            return self(*qk(x, x))
        if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return self._infer(x, qk)
        if x.shape[0] * x.shape[1] < qk.q.out_features:
            return self(*qk(x, x))  # too few tokens to pay for products of weights
        heads, weights = self.heads, self._weights()
        weight, bias = qk.drifted(weights.total)
        drifted = F.linear(x, weight, bias).unflatten(-1, (heads.queries, heads.size))
        entry, entry_bias = self._entry(qk, weights)
        latent = entry @ x.flatten(0, 1).t()
        if entry_bias is not None:
            latent = latent + entry_bias
        u, w = self._split(latent)
        return self._finish(drifted, qk.keys(x), u, w, weights)

    def _needs_key_latent(self) -> bool:
        return self.scheme == "leapfrog" or self.steps > 1

    def _entry(self, qk: FactorisedQK, weights: Weights) -> tuple[Tensor, Tensor | None]:
        """Rows W1·W_Q, then W1·W_K where needed, and their biases as a column."""
        heads, biased = self.heads, qk.q.bias is not None
        w1 = weights.w1.view(heads.queries, -1, heads.size)
        rows = [torch.bmm(w1, qk.q.weight.view(heads.queries, heads.size, -1)).flatten(0, 1)]
        biases = [torch.bmm(w1, qk.q.bias.view(heads.queries, heads.size, 1)).flatten(0, 1)] if biased else []
        if self._needs_key_latent():
            rows.append(torch.bmm(weights.w1, qk.k.weight.view(heads.keys, heads.size, -1)).flatten(0, 1))
            if biased:
                biases.append(torch.bmm(weights.w1, qk.k.bias.view(heads.keys, heads.size, 1)).flatten(0, 1))
        return torch.cat(rows), torch.cat(biases) if biased else None

    def _split(self, latent: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows (latents, N) into u and w, each (G, R·r, N)."""
        parts = latent.unflatten(0, (-1, self.heads.keys, latent.shape[0] // self._latent_blocks()))
        return parts[0], parts[1] if len(parts) > 1 else None

    def _latent_blocks(self) -> int:
        return self.heads.keys * (2 if self._needs_key_latent() else 1)

    def _finish(
        self, drifted: Tensor, k: Tensor, u: Tensor, w: Tensor | None, weights: Weights
    ) -> tuple[Tensor, Tensor]:
        """Run the trajectory and add what it left to q + nΔk and to k."""
        shape, heads = k.shape[:2], self.heads
        if weights.b1 is not None:
            u = u + weights.b1
        drift = weights.rows * w if w is not None and self._needs_key_latent() else None
        path = trajectory(
            u, drift, weights.mix, weights.pull, self.scheme, self.steps, self.force().activation
        )
        k_out = torch.baddbmm(_by_head(k), path.beta.transpose(1, 2), weights.exit_k)
        k_out = k_out.transpose(0, 1).unflatten(0, shape)
        q_out = drifted
        if path.area is not None:
            area = path.area.repeat_interleave(heads.group, dim=0)  # every query of a group shares A
            q_out = torch.baddbmm(_by_head(q_out), area.transpose(1, 2), weights.exit_q)
            q_out = q_out.transpose(0, 1).unflatten(0, shape)
        if weights.bias is not None:
            k_out = k_out + path.kicks * weights.bias
            reach = path.reach / self.steps * weights.total[:, None]
            q_out = q_out + reach * weights.bias.repeat_interleave(heads.group, dim=0)
        return q_out, k_out

    def _weights(self) -> Weights:
        heads, force, delta = self.heads, self.force(), self.delta()
        keys, group, hidden = heads.keys, heads.group, force.w1.shape[1]
        w1 = force.w1.reshape(keys, group * hidden, heads.size)
        exit_k = (force.w2 * (delta / group)[:, None, None]).transpose(1, 2)
        exit_k = exit_k.reshape(keys, group * hidden, heads.size)
        rows = delta[:, None].expand(-1, hidden).reshape(keys, -1, 1)
        exit_q = exit_k.repeat_interleave(group, dim=0) * delta[:, None, None]
        bias = pull = None
        if force.b2 is not None:
            bias = (force.b2 * delta[:, None]).view(keys, group, -1).mean(dim=1)
            pull = rows * (w1 @ bias.unsqueeze(-1))
        return Weights(
            total=self.steps * delta,
            w1=w1,
            rows=rows,
            mix=rows * (w1 @ exit_k.transpose(1, 2)),
            exit_k=exit_k,
            exit_q=exit_q,
            b1=None if force.b1 is None else force.b1.reshape(keys, -1, 1),
            bias=bias,
            pull=pull,
        )

    def _infer(self, x: Tensor, qk: FactorisedQK) -> tuple[Tensor, Tensor]:
        """Without gradients the weights' products are made once, and one product yields q and the latents."""
        weights = self._prepared(qk)
        assert weights.projection is not None
        wide = F.linear(x, weights.projection, weights.projection_bias)
        size = qk.q.out_features
        drifted = wide[..., :size].unflatten(-1, (self.heads.queries, self.heads.size))
        u, w = self._split(wide[..., size:].flatten(0, 1).t())
        return self._finish(drifted, qk.keys(x), u, w, weights)

    def _prepared(self, qk: FactorisedQK) -> Weights:
        sources = [*self.parameters(), *self.buffers(), *qk.parameters()]
        state = tuple((id(t), t._version, t.data_ptr(), t.dtype) for t in sources)
        kept: tuple[object, Weights] | None = self.__dict__.get("_kept")
        if kept is None or kept[0] != state:
            plain = self._weights()
            weight, bias = qk.drifted(plain.total)
            entry, entry_bias = self._entry(qk, plain)
            whole_bias = None
            if bias is not None and entry_bias is not None:
                whole_bias = torch.cat((bias, entry_bias.flatten()))
            made = Weights(
                **{**plain.__dict__, "projection": torch.cat((weight, entry)), "projection_bias": whole_bias}
            )
            kept = (state, made)
            self.__dict__["_kept"] = (
                kept  # beside the module's state: never saved, moved or copied as a tensor
            )
        return kept[1]


def trajectory_flops(heads: Heads, hidden: int, steps: int, scheme: Scheme) -> int:
    """Products per token of `forward`: entries, steps, exits."""
    latent = heads.group * hidden  # of one key head
    thin = 2 * heads.keys * latent * heads.size  # one D-to-latent product over all heads
    single = scheme == "euler" and steps == 1
    mixes = max(steps - 2, 0) if scheme == "euler" else steps
    entries = thin if single else 2 * thin
    exits = thin if single else thin + heads.group * thin
    return entries + mixes * 2 * heads.keys * latent * latent + exits


def _by_head(x: Tensor) -> Tensor:
    """(B, T, H, D) -> (H, N, D), a view."""
    return x.flatten(0, 1).transpose(0, 1)
