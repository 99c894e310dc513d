"""The exact cheap trajectory: euler and leapfrog in r dimensions a head instead of D.

The force f(q) = W2·σ(W1·q + b1) + b2 has its range in span(W2), and the drift q += Δk is linear. So after
any number of steps

    q_n = q + nΔ·k + Δ·W2'·A      k_n = k + W2'·β

where β sums the kicks σ(u), A sums β over the drifts, and u = W1·q + b1, all that σ needs, is itself

    u_j = u_0 + jΔ·w_0 + Δ·(W1·W2')·A_j        with w_0 = W1·k.

One entry (W1·q, W1·k), n steps on r numbers a head, one exit: O(D·r + n·r²) instead of O(n·D·r), with no
D-wide intermediate, equal to the textbook integrator up to rounding. `fused` holds the passes over memory.

Grouped heads share a key, so a group of R query heads shares one latent space of ρ = R·r dimensions:
W2' = [Δ_h·W2_h / R] side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from qkflow.attention.couplings.at_rest import AtRest, latent_at_rest
from qkflow.attention.couplings.base import Coupling, StepSize, check_steps
from qkflow.attention.couplings.fused import add_low_rank, couple
from qkflow.attention.couplings.trajectory import Activation, Rule, Scheme, walk
from qkflow.attention.heads import HeadShapes
from qkflow.attention.projections import FactorizedQK


@dataclass(frozen=True)
class Force:
    """f of every query head: W1 (H, r, D), W2 (H, D, r), biases (H, r) and (H, D) or None."""

    w1: Tensor
    w2: Tensor
    b1: Tensor | None
    b2: Tensor | None
    activation: Activation


@dataclass(frozen=True)
class Weights:
    """Everything the trajectory needs that depends on parameters alone."""

    rule: Rule
    total: Tensor  # nΔ (H,)
    w1: Tensor  # (G, ρ, D)
    rows: Tensor  # Δ of each latent row (G, ρ, 1)
    mix: Tensor  # Δ·(W1·W2') (G, ρ, ρ)
    exit_k: Tensor  # W2'ᵀ (G, ρ, D)
    exit_q: Tensor  # Δ·W2'ᵀ (H, ρ, D)
    b1: Tensor | None  # (G, ρ, 1)
    bias: Tensor | None  # what b2 adds to a key per kick (G, D)
    pull: Tensor | None  # what that does to u per drift (G, ρ, 1)

    def to(self, dtype: torch.dtype) -> Weights:
        """The same in another precision."""
        if self.total.dtype == dtype == self.mix.dtype:
            return self
        cast: dict[str, Any] = {k: v.to(dtype) for k, v in self.__dict__.items() if isinstance(v, Tensor)}
        return replace(self, **cast)


class Network(Protocol):
    """What a force is made of."""

    hidden_dim: int

    def n_params(self) -> int:
        """The number of its parameters."""
        ...


class LatentCoupling(Coupling):
    """What euler and leapfrog share: a force, a step size, and the trajectory in latent space."""

    scheme: Scheme
    network: Network

    def __init__(self, heads: HeadShapes, steps: int, step: StepSize, folded: bool) -> None:
        super().__init__(heads)
        self.steps, self.step = check_steps(steps), step
        self.folded = False  # whether q arrives as q + nΔk: the drift sits in the projection
        if folded:
            self._mark_folded()

    def force(self) -> Force:
        raise NotImplementedError

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.weights()
        q, k = couple(q, k, weights, self.folded)
        return self._add_bias(q, k, weights)

    def together(self, x: Tensor, qk: FactorizedQK) -> tuple[Tensor, Tensor]:
        """The coupled (q, k) of tokens x (B, T, width), through products of weights where those are cheaper.

        q + nΔ·k comes out of one product with W_Q + nΔ·W_K, and u out of one with W1·W_Q: no pass over q or
        k, and neither is kept for the backward pass. In training that pays while one latent is needed, and
        the weights are few beside the tokens.
        """
        few = x.shape[0] * x.shape[1] < 4 * qk.q.out_features
        if self.folded or self._needs_key_latent() or few or not self.multiplies(qk):
            return super().together(x, qk)
        weights = self.weights()
        weight, bias = qk.drifted_query_projection(weights.total)
        q = F.linear(x, weight, bias).unflatten(-1, (self.head_shapes.n_q, self.head_shapes.head_dim))
        entry, entry_bias = self._entry(qk, weights, qk.q.weight, qk.q.bias)
        latent = entry @ x.flatten(0, 1).t()
        u, _ = self._latents(latent if entry_bias is None else latent + entry_bias, weights)
        path = walk(weights.rule, u, None, weights.mix, weights.pull)  # one step: A stays zero, mix unused
        return self._add_bias(q, add_low_rank(qk.project_keys(x), path.beta, weights.exit_k), weights)

    def take_linear_drift(self) -> Tensor | None:
        if self.folded:
            return None
        self._mark_folded()
        self._forget()
        return self.steps * self.step.per_head().detach()

    def _mark_folded(self) -> None:
        """Also in the state, so that weights with and without the drift are never taken for one another."""
        self.folded = True
        self.register_buffer("drift_is_folded", torch.ones((), device=self.step.value.device))

    def extra_parameters(self) -> int:
        return self.network.n_params() + self.step.n_params()

    def extra_flops(self) -> int:
        return trajectory_flops(self.head_shapes, self.network.hidden_dim, self.steps, self.scheme)

    def at_rest(self, qk: FactorizedQK) -> AtRest:
        return latent_at_rest(self, qk)

    def _latents(self, rows: Tensor, weights: Weights) -> tuple[Tensor, Tensor | None]:
        """u and, where it is needed, the drift Δ·w, each (G, ρ, N), from the rows (…, N) of `_entry`."""
        u, *w = rows.unflatten(0, (-1, self.head_shapes.n_k, weights.w1.shape[1])).unbind()
        if weights.b1 is not None:
            u = u + weights.b1
        return u, weights.rows * w[0] if w else None

    def _add_bias(self, q: Tensor, k: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        if weights.bias is None:
            return q, k
        reach = weights.rule.reach(self.steps) / self.steps * weights.total[:, None]
        to_q = reach * weights.bias.repeat_interleave(self.head_shapes.group_size, dim=0)
        return q + to_q.to(q.dtype), k + (self.steps * weights.bias).to(k.dtype)

    def _needs_key_latent(self) -> bool:
        return self.scheme == "leapfrog" or self.steps > 1

    def _entry(
        self, qk: FactorizedQK, weights: Weights, w_q: Tensor, b_q: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Rows W1·W_Q, then W1·W_K where needed, and their biases as a column."""
        heads = self.head_shapes
        per_query = weights.w1.view(heads.n_q, -1, heads.head_dim)
        parts = [(per_query, w_q, b_q)]
        if self._needs_key_latent():
            parts.append((weights.w1, qk.k.weight, qk.k.bias))
        rows = [(w1 @ w.view(len(w1), heads.head_dim, -1)).flatten(0, 1) for w1, w, _ in parts]
        biases = [
            (w1 @ b.view(len(w1), heads.head_dim, 1)).flatten(0, 1) for w1, _, b in parts if b is not None
        ]
        return torch.cat(rows), torch.cat(biases) if biases else None

    def weights(self) -> Weights:
        heads, force, delta = self.head_shapes, self.force(), self.step.per_head()
        keys, group, hidden = heads.n_k, heads.group_size, force.w1.shape[1]
        w1 = force.w1.reshape(keys, group * hidden, heads.head_dim)
        exit_k = (force.w2 * (delta / group)[:, None, None]).transpose(1, 2)
        exit_k = exit_k.reshape(keys, group * hidden, heads.head_dim)
        rows = delta[:, None].expand(-1, hidden).reshape(keys, -1, 1)
        bias = pull = None
        if force.b2 is not None:
            bias = (force.b2 * delta[:, None]).view(keys, group, -1).mean(dim=1)
            pull = rows * (w1 @ bias.unsqueeze(-1))
        return Weights(
            rule=Rule(self.scheme, self.steps, force.activation),
            total=self.steps * delta,
            w1=w1,
            rows=rows,
            mix=rows * (w1 @ exit_k.transpose(1, 2)),
            exit_k=exit_k,
            exit_q=exit_k.repeat_interleave(group, dim=0) * delta[:, None, None],
            b1=None if force.b1 is None else force.b1.reshape(keys, -1, 1),
            bias=bias,
            pull=pull,
        )


def trajectory_flops(heads: HeadShapes, hidden: int, steps: int, scheme: Scheme) -> int:
    """Products per token of `forward`: entries, steps, exits."""
    latent = heads.group_size * hidden  # of one key head
    thin = 2 * heads.n_k * latent * heads.head_dim  # one D-to-latent product over all heads
    single = scheme == "euler" and steps == 1
    mixes = max(steps - 2, 0) if scheme == "euler" else steps
    entries = thin if single else 2 * thin
    exits = thin if single else thin + heads.group_size * thin
    return entries + mixes * 2 * heads.n_k * latent * latent + exits
