"""The exact cheap trajectory: euler and leapfrog in r dimensions a head instead of D.

The force f(q) = W2·σ(W1·q + b1) + b2 has its range in span(W2), and the drift q += Δk is linear. So after
any number of steps

    q_n = q + nΔ·k + Δ·W2'·A      k_n = k + W2'·β

where β sums the kicks σ(u), A sums β over the drifts, and u = W1·q + b1, all that σ needs, is itself

    u_j = u_0 + jΔ·w_0 + Δ·(W1·W2')·A_j        with w_0 = W1·k.

One entry (W1·q, W1·k), n steps on r numbers a head, one exit: O(D·r + n·r²) instead of O(n·D·r), with no
D-wide intermediate, equal to the textbook integrator up to rounding.

Grouped heads share a key, so a group of R query heads shares one latent space of R·r dimensions:
W2' = [Δ_h·W2_h / R] side by side. Latents are laid out (G, R·r, N) with the N = B·T tokens last: the small
matrices multiply from the left, which the batched product likes best by far.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qkflow.attention.couplings.base import add_drift
from qkflow.attention.heads import Heads

Scheme = Literal["euler", "leapfrog"]
Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Force:
    """f of every query head: W1 (H, r, D), W2 (H, D, r), biases (H, r) and (H, D) or None."""

    w1: Tensor
    w2: Tensor
    b1: Tensor | None
    b2: Tensor | None
    activation: Activation


def evolve(
    q: Tensor, k: Tensor, force: Force, delta: Tensor, steps: int, scheme: Scheme, heads: Heads, folded: bool
) -> tuple[Tensor, Tensor]:
    """(q, k) after `steps` steps of size `delta` (H,).

    With `folded`, q already holds q + nΔk: the drift sits in the projection.
    """
    batch, length, group = q.shape[0], q.shape[1], heads.group
    hidden = force.w1.shape[1]
    q_heads = q.flatten(0, 1).transpose(0, 1)  # (H, N, D), views of the projections' output
    k_heads = k.flatten(0, 1).transpose(0, 1)  # (G, N, D)

    w1 = force.w1.unflatten(0, (heads.keys, group)).flatten(1, 2)  # (G, R·r, D)
    w2 = force.w2 * (delta / group)[:, None, None]
    w2 = w2.unflatten(0, (heads.keys, group)).transpose(2, 3).flatten(1, 2)  # W2'ᵀ: (G, R·r, D)
    rows = (
        delta.view(heads.keys, group, 1).expand(-1, -1, hidden).flatten(1).unsqueeze(-1)
    )  # Δ of each latent
    mix = rows * (w1 @ w2.transpose(1, 2))  # Δ·(W1·W2')

    u = torch.bmm(force.w1, q_heads.transpose(1, 2)).unflatten(0, (heads.keys, group)).flatten(1, 2)
    if force.b1 is not None:
        u = u + force.b1.reshape(heads.keys, -1, 1)
    needs_drift = folded or steps > 1 or scheme == "leapfrog"
    drift = rows * torch.bmm(w1, k_heads.transpose(1, 2)) if needs_drift else None
    if folded and drift is not None:
        u = u - steps * drift
    bias = None
    if force.b2 is not None:
        bias = group_bias(force.b2, delta, heads)  # (G, D): what one kick adds to the key besides W2'·σ
        pull = rows * (w1 @ bias.unsqueeze(-1))
    else:
        pull = None

    beta, area, kicks, reach = _TRAJECTORIES[scheme](u, drift, mix, pull, force.activation, steps)

    k_out = torch.baddbmm(k_heads, beta.transpose(1, 2), w2)
    q_out = q if folded else add_drift(q, k, steps * delta)
    if area is not None:
        spread = area.unsqueeze(1).expand(-1, group, -1, -1).flatten(0, 1)  # every query of a group shares A
        exit_q = (w2.unsqueeze(1) * delta.view(heads.keys, group, 1, 1)).flatten(0, 1)
        q_out = torch.baddbmm(q_out.flatten(0, 1).transpose(0, 1), spread.transpose(1, 2), exit_q)
        q_out = q_out.transpose(0, 1).unflatten(0, (batch, length))
    k_out = k_out.transpose(0, 1).unflatten(0, (batch, length))
    if bias is not None:
        k_out = k_out + kicks * bias
        q_out = q_out + reach * delta[:, None] * bias.repeat_interleave(group, dim=0)
    return q_out, k_out


def group_bias(b2: Tensor, delta: Tensor, heads: Heads) -> Tensor:
    return (b2 * delta[:, None]).unflatten(0, (heads.keys, heads.group)).mean(dim=1)


# Each trajectory returns β, A (None where it stays zero), and the same two sums for σ ≡ 1.
Trajectory = tuple[Tensor, Tensor | None, float, float]


def _position(
    u: Tensor, drift: Tensor, mix: Tensor, pull: Tensor | None, area: Tensor | None, reach: float, step: int
) -> Tensor:
    """u_j = u_0 + jΔ·w_0 + Δ·(W1·W2')·A_j (+ the part of b2)."""
    base = torch.add(u, drift, alpha=step)
    if pull is not None:
        base = base + reach * pull
    return base if area is None else torch.baddbmm(base, mix, area)


def _euler(
    u: Tensor, drift: Tensor | None, mix: Tensor, pull: Tensor | None, activation: Activation, steps: int
) -> Trajectory:
    """A += β ; β += σ(u) ; u moves: all from the old values."""
    beta, area, reach = activation(u), None, 0.0
    for step in range(1, steps):
        assert drift is not None
        now = _position(u, drift, mix, pull, area, reach, step)
        area = beta if area is None else area + beta
        reach += step
        beta = beta + activation(now)
    return beta, area, float(steps), reach


def _leapfrog(
    u: Tensor, drift: Tensor | None, mix: Tensor, pull: Tensor | None, activation: Activation, steps: int
) -> Trajectory:
    """Half a kick, then drift and kick in turn, half a kick at the end: neighbouring half kicks are one."""
    assert drift is not None
    beta = 0.5 * activation(u)
    area, reach = beta, 0.5
    for step in range(1, steps + 1):
        force = activation(_position(u, drift, mix, pull, area, reach, step))
        if step < steps:
            beta = beta + force
            area = area + beta
            reach += step + 0.5
        else:
            beta = torch.add(beta, force, alpha=0.5)
    return beta, area, float(steps), reach


_TRAJECTORIES = {"euler": _euler, "leapfrog": _leapfrog}
