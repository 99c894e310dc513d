"""φ_θ: the variational approximation of the equilibrium manifold p_st(y).

A softmax output is a distribution for all weights, so the remaining condition is W p = 0. The loss is
E‖W(y)·φ_θ(y)‖² over the slow variable; it is zero exactly where φ_θ = p_st. The exact solution is not used in
training, only in the evaluation KL(p_st‖φ_θ).
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
    """φ_θ: angle y (...) → distribution (..., N), an MLP of (cos y, sin y) with two hidden layers."""

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
    """Return KL(p‖q) (...) in nats for p, q (..., N); states with p = 0 contribute 0."""
    return (torch.special.xlogy(p, p) - torch.special.xlogy(p, q)).sum(-1)


@dataclass(frozen=True)
class FitResult:
    """φ_θ after training, and its history on a grid of angles: step, E‖Wφ‖², mean and max KL(p_st‖φ)."""

    phi: StationaryNet
    steps: list[int]
    residuals: list[float]
    kl_mean: list[float]
    kl_max: list[float]


def fit_stationary_net(
    generator: DriftingGenerator,
    steps: int = 2000,
    hidden_dim: int = 32,
    batch_size: int = 64,
    lr: float = 1e-2,
    seed: int = 0,
    callback: Callable[[int, float], None] = lambda step, kl: None,
) -> FitResult:
    """Train φ_θ with Adam on random angles; evaluate it about 100 times on a fixed grid.

    `callback` receives the step and the mean KL of every evaluation.
    """
    if min(steps, hidden_dim, batch_size) < 1 or not lr > 0:
        raise InputError(
            "steps, hidden_dim, batch_size and lr must be positive, "
            f"not {steps}, {hidden_dim}, {batch_size} and {lr:g}",
            code="option-not-positive",
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        phi = StationaryNet(generator.n_states, hidden_dim)
    rng = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(phi.parameters(), lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    y_grid = circle_angles(256)
    W_grid, exact = generator.at(y_grid), generator.stationary(y_grid)
    history = FitResult(phi, [], [], [], [])
    for step in range(steps + 1):
        if step % math.ceil(steps / 100) == 0 or step == steps:
            _record(history, step, W_grid, exact, y_grid)
            callback(step, history.kl_mean[-1])
        if step < steps:
            y = 2 * math.pi * torch.rand(batch_size, generator=rng, dtype=torch.float64)
            optimizer.zero_grad()
            residual(generator.at(y), phi(y)).backward()
            optimizer.step()
            scheduler.step()
    return history


def residual(W: Tensor, p: Tensor) -> Tensor:
    """Return the loss E‖W p‖² for generators W (B, N, N) and distributions p (B, N)."""
    return (W @ p[..., None]).square().sum((-2, -1)).mean()


@torch.no_grad()
def _record(history: FitResult, step: int, W: Tensor, exact: Tensor, y: Tensor) -> None:
    p = history.phi(y)
    kl = kl_divergence(exact, p)
    history.steps.append(step)
    history.residuals.append(float(residual(W, p)))
    history.kl_mean.append(float(kl.mean()))
    history.kl_max.append(float(kl.max()))
