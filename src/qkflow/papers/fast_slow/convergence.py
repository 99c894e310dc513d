"""Convergence of the fast-slow system to its equilibrium manifold as ε → 0.

    ε·ẋ = W(y) x          x: distribution over N states, fast
      ẏ = ω(1 + ½ b·x)    y: angle, slow, integrated over one turn; x feeds back through b

For ε → 0, x follows the equilibrium manifold x = p_st(y) (Gao, arXiv 2606.16730; the theorem is Tikhonov's,
Matematicheskii Sbornik 31, 1952). The first-order correction has the closed form
x = p_st + ε·W#·ṗ_st + O(ε²), with W# the inverse of W on vectors that sum to zero.
`predicted_error_per_epsilon` evaluates it, so that the measured error has a prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qkflow.errors import InputError
from qkflow.papers.fast_slow.master_equation import (
    check_generator,
    generator_from_rates,
    stationary_distribution,
)

EPSILONS = tuple(2.0**-k for k in range(1, 7))
LOG_RATE_STD = 0.5  # standard deviation of the coefficients a_ij, b_ij of the log rates


class DriftingGenerator:
    """A generator that depends on the slow angle y: W_ij(y) = W_ij·exp(a_ij·cos y + b_ij·sin y).

    Zero rates stay zero, so W(y) is irreducible if W is. Rates are scaled to a smallest spectral gap of 1
    over the circle, so that a drift ω ≪ 1 is slow for every generator.
    """

    def __init__(self, W: Tensor, seed: int = 0, log_rate_std: float = LOG_RATE_STD) -> None:
        W = check_generator(W.cpu())
        if W.ndim != 2:
            raise InputError(
                f"the fast-slow system takes one generator (N, N), not a batch of shape {tuple(W.shape)}",
                code="generator-batch",
            )
        N = W.shape[-1]
        rng = torch.Generator().manual_seed(seed)
        self.log_rate_coeffs = log_rate_std * torch.randn(2, N, N, generator=rng, dtype=torch.float64)
        self.feedback = 2 * torch.rand(N, generator=rng, dtype=torch.float64) - 1  # b
        self.rates = W - torch.diag_embed(W.diagonal())
        try:
            on_circle = torch.stack([check_generator(each) for each in self.at(circle_angles(64))])
        except InputError as error:
            raise InputError(f"W(y) is invalid for some y: {error}", code=error.code) from None
        second_eigenvalue = torch.linalg.eigvals(on_circle).real.sort(-1).values[:, -2]
        self.rates = self.rates / -float(second_eigenvalue.max())

    @property
    def n_states(self) -> int:
        return self.rates.shape[-1]

    def at(self, y: Tensor) -> Tensor:
        """Return W(y) (..., N, N) for angles y (...)."""
        return generator_from_rates(self._rates(y))

    def derivative(self, y: Tensor) -> Tensor:
        """Return dW/dy (..., N, N) for angles y (...)."""
        y = y[..., None, None]
        return generator_from_rates(
            self._rates(y[..., 0, 0])
            * (self.log_rate_coeffs[1] * y.cos() - self.log_rate_coeffs[0] * y.sin())
        )

    def matvec(self, x: Tensor, y: Tensor) -> Tensor:
        """Return W(y)·x for one x (N,) and one y, without building the diagonal."""
        rates = self._rates(y)
        return rates @ x - rates.sum(0) * x

    def stationary(self, y: Tensor) -> Tensor:
        """Return the equilibrium manifold p_st(y) (..., N)."""
        return stationary_distribution(self.at(y), check=False)  # checked in __init__

    def _rates(self, y: Tensor) -> Tensor:
        y = y[..., None, None]
        return self.rates * (self.log_rate_coeffs[0] * y.cos() + self.log_rate_coeffs[1] * y.sin()).exp()


def circle_angles(n_points: int) -> Tensor:
    """Return `n_points` equally spaced angles in [0, 2π)."""
    return torch.arange(n_points, dtype=torch.float64) * (2 * math.pi / n_points)


@dataclass(frozen=True)
class Trajectory:
    """The solution at the S steps of the integrator: t (S,), x (S, N), y (S,) and ‖x − p_st(y)‖₁ (S,)."""

    epsilon: float
    t: Tensor
    x: Tensor
    y: Tensor
    distance: Tensor

    @property
    def error(self) -> float:
        return float(self.distance.max())


def integrate(
    generator: DriftingGenerator, epsilon: float, drift: float, x0: Tensor | None = None, min_steps: int = 200
) -> Trajectory:
    """Integrate over one turn of y in at least `min_steps` steps, from x0 (N,) or from p_st(0).

    Radau IIA (order 5, L-stable), because the stiffness 1/ε does not limit its step size. Its tolerances are
    far below the measured distance, which shrinks with ε.
    """
    from scipy.integrate import solve_ivp

    if not (epsilon > 0 and drift > 0):
        raise InputError(
            f"epsilon and drift must be positive, not {epsilon:g} and {drift:g}", code="option-not-positive"
        )
    N, feedback = generator.n_states, 0.5 * drift * generator.feedback
    duration = 2 * math.pi / drift

    def velocity(t: float, z: Any) -> Any:
        z = torch.as_tensor(z)
        return torch.cat([generator.matvec(z[:N], z[N]) / epsilon, (drift + feedback @ z[:N])[None]]).numpy()

    def jacobian(t: float, z: Any) -> Any:
        z = torch.as_tensor(z)
        fast = torch.cat([generator.at(z[N]), (generator.derivative(z[N]) @ z[:N])[:, None]], 1) / epsilon
        return torch.cat([fast, torch.cat([feedback, feedback.new_zeros(1)])[None]]).numpy()

    def end_of_turn(t: float, z: Any) -> float:
        return float(z[N] - 2 * math.pi)

    end_of_turn.terminal = True  # type: ignore[attr-defined]  # scipy's mark of an event that stops
    y = torch.zeros(1, dtype=torch.float64)
    z = torch.cat([generator.stationary(y)[0] if x0 is None else x0, y]).numpy()
    solution = solve_ivp(
        velocity,
        (0.0, 2 * duration),  # ẏ ≥ ω/2, so the turn ends within twice its mean duration
        z,
        method="Radau",
        jac=jacobian,
        events=end_of_turn,
        rtol=1e-8,
        atol=1e-11,
        max_step=duration / min_steps,  # so that no step misses the peak
    )
    if not solution.success:
        raise RuntimeError(f"the integration failed at epsilon {epsilon:g}: {solution.message}")
    x, y = torch.as_tensor(solution.y[:N].T.copy()), torch.as_tensor(solution.y[N].copy())
    distance = (x - generator.stationary(y)).abs().sum(-1)
    return Trajectory(epsilon, torch.as_tensor(solution.t), x, y, distance)


def predicted_error_per_epsilon(generator: DriftingGenerator, drift: float, n_points: int = 512) -> float:
    """Return sup over the turn of ‖W#·ṗ_st‖₁, the limit of error/ε.

    W − 11ᵀ inverts W on vectors that sum to zero; differentiating W p_st = 0 gives ṗ_st = −W#·Ẇ·p_st.
    """
    y = circle_angles(n_points)
    factors = torch.linalg.lu_factor(generator.at(y) - 1.0)
    p = torch.linalg.lu_solve(*factors, -torch.ones(n_points, generator.n_states, 1, dtype=torch.float64))
    velocity = drift + 0.5 * drift * (generator.feedback @ p)[..., None]
    p_velocity = -torch.linalg.lu_solve(*factors, generator.derivative(y) @ p) * velocity
    return float(torch.linalg.lu_solve(*factors, p_velocity)[..., 0].abs().sum(-1).max())


@dataclass(frozen=True)
class Convergence:
    """Distance from the equilibrium manifold for every ε, and the fitted order in ε."""

    trajectories: list[Trajectory]
    predicted_error_per_epsilon: float
    order: float

    @property
    def errors(self) -> dict[float, float]:
        return {trajectory.epsilon: trajectory.error for trajectory in self.trajectories}


def fitted_order(epsilons: Sequence[float], errors: Sequence[float]) -> float:
    """Return the least-squares slope of log error against log ε."""
    log_epsilon, log_error = torch.tensor(epsilons).double().log(), torch.tensor(errors).double().log()
    centered = log_epsilon - log_epsilon.mean()
    return float(centered @ log_error / (centered @ centered))


def measure_convergence(
    generator: DriftingGenerator,
    drift: float,
    epsilons: Sequence[float] = EPSILONS,
    min_steps: int = 200,
    callback: Callable[[Trajectory], None] = lambda trajectory: None,
) -> Convergence:
    """Integrate for every ε and fit the order; `callback` is called after every integration."""
    if len(set(epsilons)) < 2:
        raise InputError(
            "fitting an order needs at least two different values of epsilon", code="too-few-epsilons"
        )
    trajectories = []
    for epsilon in epsilons:
        trajectories.append(integrate(generator, epsilon, drift, min_steps=min_steps))
        callback(trajectories[-1])
    order = fitted_order(epsilons, [trajectory.error for trajectory in trajectories])
    return Convergence(trajectories, predicted_error_per_epsilon(generator, drift), order)
