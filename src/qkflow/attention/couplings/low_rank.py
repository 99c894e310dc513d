"""The exact low-rank trajectory of euler and leapfrog: n steps in r dimensions per head instead of D.

The force f(q) = W2·σ(W1·q + b1) + b2 has its range in span(W2), and the drift q += Δk is linear. So after n
steps

    q_n = q + nΔ·k + Δ·W2'·A      k_n = k + W2'·β

β sums the kicks σ(u) and A sums β over the drifts. u = W1·q + b1 is all that σ reads. One drift moves it by

    Δ·W1·k_j = Δ·W1·k + Δ·(W1·W2')·β

So one entry (W1·q, W1·k), n steps on r numbers per head and one exit suffice: O(D·r + n·r²) instead of
O(n·D·r), with no D-wide intermediate. The result equals the textbook integrator up to rounding.

Grouped heads share a key. A group of R query heads has one latent space of ρ = R·r dimensions, and
W2' = [Δ_h·W2_h / R], side by side. Latents are (G, ρ, N) with the N = B·T tokens last.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from qkflow.attention.couplings.base import Coupling, PreparedQK
from qkflow.attention.couplings.layers import (
    LowRankForce,
    StepSize,
    add_drift,
    check_steps,
    heads_first,
    tokens_first,
)
from qkflow.attention.projections import FactorizedQK, HeadShapes, stack_linear

Scheme = Literal["euler", "leapfrog"]


@dataclass(frozen=True)
class TrajectoryWeights:
    """Tensors of the trajectory that depend on the parameters alone."""

    drift: Tensor  # nΔ (H,)
    w1: Tensor  # (G, ρ, D)
    step: Tensor  # Δ of every latent (G, ρ, 1)
    mix: Tensor  # Δ·(W1·W2') (G, ρ, ρ)
    exit_k: Tensor  # W2'ᵀ (G, ρ, D)
    exit_q: Tensor  # Δ·W2'ᵀ (H, ρ, D)
    b1: Tensor | None  # (G, ρ, 1)
    b2_k: Tensor | None  # added to a key by b2 per kick (G, D)
    b2_u: Tensor | None  # added to u by that per drift (G, ρ, 1)
    activation: str

    def to(self, dtype: torch.dtype) -> TrajectoryWeights:
        """Cast all tensors."""
        if self.drift.dtype == dtype == self.mix.dtype:
            return self
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        cast: dict[str, Any] = {n: x.to(dtype) if isinstance(x, Tensor) else x for n, x in values.items()}
        return TrajectoryWeights(**cast)


class LowRankNetwork(Protocol):
    """A network whose force has low rank: `HeadNetworks` or `HeadPotentials`."""

    hidden_dim: int

    def as_force(self) -> LowRankForce: ...


class LowRankCoupling(Coupling):
    """Base class of euler and leapfrog: a low-rank force, a step size and the trajectory in latent space."""

    scheme: ClassVar[Scheme]
    network: LowRankNetwork

    def __init__(self, head_shapes: HeadShapes, steps: int, step: StepSize) -> None:
        super().__init__(head_shapes)
        self.steps, self.step = check_steps(steps), step

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        w = self.trajectory_weights().to(q.dtype)
        w1 = w.w1.view(self.head_shapes.n_q, -1, w.w1.shape[-1])
        u = project_latents(q, w1).reshape(*w.w1.shape[:2], q.shape[0] * q.shape[1])
        if w.b1 is not None:
            u = u + w.b1
        velocity = project_latents(k, w.step * w.w1) if self._u_moves else None
        q = add_drift(q, k, w.drift)
        if w.b2_k is not None:
            q, k = q + self._b2_query(w), k + self.steps * w.b2_k
        return self._exit(q, k, *self.integrate(u, velocity, w), w)

    def integrate(
        self, u: Tensor, velocity: Tensor | None, w: TrajectoryWeights
    ) -> tuple[Tensor, Tensor | None]:
        """Return β and A (None for zero) after all steps, from u and velocity = Δ·W1·k, both (G, ρ, N)."""
        sigma = F.silu if w.activation == "silu" else torch.sigmoid
        beta: Tensor | None = None
        area: Tensor | None = None

        def drift(u: Tensor, kicks: float) -> Tensor:
            assert velocity is not None
            u = u + velocity if beta is None else torch.baddbmm(u + velocity, w.mix, beta)
            return u if w.b2_u is None else u + kicks * w.b2_u

        if self.scheme == "euler":  # q and k move from the old values
            for j in range(self.steps):
                kick = sigma(u)
                if j + 1 < self.steps:
                    u = drift(u, j)
                if beta is not None:
                    area = beta if area is None else area + beta
                beta = kick if beta is None else beta + kick
        else:  # kick, drift, kick
            kick = sigma(u)
            for j in range(self.steps):
                beta = 0.5 * kick if beta is None else torch.add(beta, kick, alpha=0.5)
                u = drift(u, j + 0.5)
                area = beta if area is None else area + beta
                kick = sigma(u)
                beta = torch.add(beta, kick, alpha=0.5)
        assert beta is not None
        return beta, area

    def prepare_for_inference(self, qk: FactorizedQK) -> PreparedQK:
        """Put the drift, the entry W1 and all biases into the projection; the steps and the exit remain."""
        with torch.no_grad():
            w = self.trajectory_weights().to(qk.q.weight.dtype)
            w1 = w.w1.view(self.head_shapes.n_q, -1, w.w1.shape[-1])
            b1 = None if w.b1 is None else w.b1.flatten()
            weight, bias = qk.drifted_query_projection(w.drift)
            key_bias: Tensor | None = qk.k.bias
            if w.b2_k is not None:
                bias = _plus(bias, self._b2_query(w).flatten())
                key_bias = _plus(key_bias, (self.steps * w.b2_k).flatten())
            u_weight, u_bias = _compose(w1, qk.q.weight, qk.q.bias)
            rows = [(weight, bias), (qk.k.weight, key_bias), (u_weight, _plus(u_bias, b1))]
            if self._u_moves:
                rows.append(_compose(w.step * w.w1, qk.k.weight, qk.k.bias))
            weight, bias = stack_linear(rows)
        n_groups, n_latents = w.w1.shape[:2]

        def finish(q: Tensor, k: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
            tokens_last = latents.reshape(-1, latents.shape[-1]).t()
            u, *velocity = tokens_last.unflatten(0, (-1, n_groups, n_latents))
            beta, area = self.integrate(u, velocity[0] if velocity else None, w)
            return self._exit(q, k, beta, area, w)

        return PreparedQK(self.head_shapes, weight, bias, finish)

    def diagnostics(self) -> dict[str, Tensor]:
        return {"step_size": self.step.per_head().detach()}

    def extra_flops(self) -> int:
        shapes = self.head_shapes
        latents = shapes.group_size * self.network.hidden_dim
        thin = 2 * shapes.n_k * latents * shapes.head_dim  # one matmul between D and ρ over all heads
        mixes = self.steps if self.scheme == "leapfrog" else max(self.steps - 2, 0)
        entries = 2 * thin if self._u_moves else thin
        exits = thin + shapes.group_size * thin if self._u_moves else thin
        return entries + mixes * 2 * shapes.n_k * latents * latents + exits

    @property
    def _u_moves(self) -> bool:
        """Whether σ is evaluated anywhere but at the initial u."""
        return self.scheme == "leapfrog" or self.steps > 1

    def _b2_query(self, w: TrajectoryWeights) -> Tensor:
        """Return what b2 adds to q (H, D): its kicks summed over the drifts."""
        assert w.b2_k is not None
        n = self.steps
        drifts = n / 2 if self.scheme == "leapfrog" else (n - 1) / 2
        return drifts * w.drift[:, None] * w.b2_k.repeat_interleave(self.head_shapes.group_size, dim=0)

    def _exit(
        self, q: Tensor, k: Tensor, beta: Tensor, area: Tensor | None, w: TrajectoryWeights
    ) -> tuple[Tensor, Tensor]:
        if area is not None:
            if self.head_shapes.group_size > 1:
                area = area.repeat_interleave(self.head_shapes.group_size, dim=0)
            q = add_low_rank(q, area, w.exit_q)
        return q, add_low_rank(k, beta, w.exit_k)

    def trajectory_weights(self) -> TrajectoryWeights:
        shapes, force, delta = self.head_shapes, self.network.as_force(), self.step.per_head()
        n_groups, group, r = shapes.n_k, shapes.group_size, force.w1.shape[1]
        w1 = force.w1.reshape(n_groups, group * r, shapes.head_dim)
        exit_k = (force.w2 * (delta / group)[:, None, None]).transpose(1, 2)
        exit_k = exit_k.reshape(n_groups, group * r, shapes.head_dim)
        step = delta[:, None].expand(-1, r).reshape(n_groups, -1, 1)
        b2_k = b2_u = None
        if force.b2 is not None:
            b2_k = (force.b2 * delta[:, None]).view(n_groups, group, -1).mean(dim=1)
            b2_u = step * (w1 @ b2_k.unsqueeze(-1))
        return TrajectoryWeights(
            drift=self.steps * delta,
            w1=w1,
            step=step,
            mix=step * (w1 @ exit_k.transpose(1, 2)),
            exit_k=exit_k,
            exit_q=exit_k.repeat_interleave(group, dim=0) * delta[:, None, None],
            b1=None if force.b1 is None else force.b1.reshape(n_groups, -1, 1),
            b2_k=b2_k,
            b2_u=b2_u,
            activation=force.activation,
        )


def project_latents(x: Tensor, w1: Tensor) -> Tensor:
    """Return W1·x (H, r, N) of x (B, T, H, D) for W1 (H, r, D).

    Tokens come first in the matmul, so that the gradient of x has contiguous rows.
    """
    return torch.bmm(heads_first(x), w1.transpose(1, 2)).transpose(1, 2)


def add_low_rank(x: Tensor, coefficients: Tensor, rows: Tensor) -> Tensor:
    """Return x (B, T, H, D) + coefficientsᵀ·rows, for coefficients (H, ρ, N) and rows (H, ρ, D)."""
    out = torch.baddbmm(heads_first(x), coefficients.transpose(1, 2), rows)
    return tokens_first(out, x.shape[:2])


def add_force(x: Tensor, force: LowRankForce, delta: Tensor | None = None, steps: int = 1) -> Tensor:
    """Apply x ← x + Δ·f(x) n times to x (B, T, H, D), in the r dimensions that f reads; None: Δ = 1."""
    dtype = x.dtype
    rows, bias = force.w2.transpose(1, 2), force.b2
    if delta is not None:
        rows = rows * delta[:, None, None]  # Δ·W2ᵀ
        bias = None if bias is None else bias * delta[:, None]
    u = project_latents(x, force.w1.to(dtype))
    if force.b1 is not None:
        u = u + force.b1.unsqueeze(-1).to(dtype)
    kicks = F.silu(u)
    mix = (force.w1 @ rows.transpose(1, 2)).to(dtype) if steps > 1 else None
    for step in range(1, steps):
        assert mix is not None
        u_step = torch.baddbmm(u, mix, kicks)
        if bias is not None:
            u_step = u_step + step * (force.w1 @ bias.unsqueeze(-1)).to(dtype)
        kicks = kicks + F.silu(u_step)
    out = add_low_rank(x, kicks, rows.to(dtype))
    return out if bias is None else out + (steps * bias).to(dtype)


def _compose(w1: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return W1·(W·x + b) as one linear map, for W1 (heads, r, D) and a projection to as many heads."""
    n_heads, _, head_dim = w1.shape
    composed = (w1 @ weight.view(n_heads, head_dim, -1)).flatten(0, 1)
    return composed, None if bias is None else (w1 @ bias.view(n_heads, head_dim, 1)).flatten()


def _plus(bias: Tensor | None, more: Tensor | None) -> Tensor | None:
    if bias is None or more is None:
        return more if bias is None else bias
    return bias + more
