"""φ_θ: the equilibrium manifold p_st(y) found by descent instead of by solving.

A softmax-output network is a distribution whatever its weights, so the one condition left is W p = 0, and
E‖W(y)·φ_θ(y)‖² over the slow variable measures how badly it is missed: zero exactly where φ_θ = p_st. The
exact solution plays no part in the training; it is only what the result is compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qkflow.errors import InputError
from qkflow.papers.fast_slow.convergence import DriftingGenerator, circle_angles


class StationaryNet(nn.Module):
    """Angle y (...) → distribution (..., N), through a two-layer network of (cos y, sin y)."""

    def __init__(self, n_states: int, hidden_dim: int) -> None:
        super().__init__()
        self.logits = nn.Sequential(
            nn.Linear(2, hidden_dim),
            nn.SiLU(),
            nn.Linear(hidden_dim, hidden_dim),
            nn.SiLU(),
            nn.Linear(hidden_dim, n_states),
        ).double()

    def forward(self, y: Tensor) -> Tensor:
        return torch.softmax(self.logits(torch.stack([y.cos(), y.sin()], -1)), -1)


def kl_divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p‖q) (...,) in nats; states with p = 0 add nothing."""
    return (torch.special.xlogy(p, p) - torch.special.xlogy(p, q)).sum(-1)


@dataclass(frozen=True)
class FitResult:
    """φ_θ after training, and its history on the circle: step, E‖Wφ‖², mean and largest KL(p_st‖φ)."""

    phi: StationaryNet
    steps: list[int]
    residuals: list[float]
    kl_mean: list[float]
    kl_max: list[float]


def fit_stationary_net(
    generator: DriftingGenerator,
    steps: int = 2000,
    hidden_dim: int = 32,
    batch: int = 64,
    lr: float = 1e-2,
    seed: int = 0,
    callback: Callable[[int, float], None] = lambda step, kl: None,
) -> FitResult:
    """Train φ_θ with Adam on random angles; about a hundred times on the way, measure it on a fixed grid.

    `each` is told the step and the mean KL of every measurement.
    """
    if min(steps, hidden_dim, batch) < 1 or not lr > 0:
        raise InputError(
            "training φ needs positive steps, hidden, batch and learning rate, "
            f"not {steps}, {hidden_dim}, {batch} and {lr:g}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        phi = StationaryNet(generator.n_states, hidden_dim)
    source = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(phi.parameters(), lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    y_grid = circle_angles(256)
    W_grid, exact = generator.at(y_grid), generator.stationary(y_grid)
    history = FitResult(phi, [], [], [], [])
    for step in range(steps + 1):
        if step % math.ceil(steps / 100) == 0 or step == steps:
            _record(history, step, W_grid, exact, y_grid)
            callback(step, history.kl_mean[-1])
        if step < steps:
            y = 2 * math.pi * torch.rand(batch, generator=source, dtype=torch.float64)
            optimizer.zero_grad()
            residual(generator.at(y), phi(y)).backward()
            optimizer.step()
            schedule.step()
    return history


def residual(W: Tensor, p: Tensor) -> Tensor:
    """E‖W p‖², the loss: how fast the distributions p (B, N) would still move under their generators."""
    return (W @ p[..., None]).square().sum((-2, -1)).mean()


@torch.no_grad()
def _record(history: FitResult, step: int, W: Tensor, exact: Tensor, y: Tensor) -> None:
    p = history.phi(y)
    apart = kl_divergence(exact, p)
    history.steps.append(step)
    history.residuals.append(float(residual(W, p)))
    history.kl_mean.append(float(apart.mean()))
    history.kl_max.append(float(apart.max()))
