"""The fast-slow system whose limit the slow path borrows, integrated for smaller and smaller ε.

    ε·ẋ = W(y) x          x: a distribution over N states, fast
      ẏ = ω(1 + ½ b·x)    y: an angle that turns once, slow, and driven by x in return

For ε → 0, x follows the equilibrium manifold x = p_st(y) (Gao, arXiv 2606.16730; the theorem is Tikhonov's,
Matematicheskii Sbornik 31, 1952). The first correction is known in closed form, x = p_st + ε·W#·ṗ_st + O(ε²),
with W# the inverse of W on vectors that sum to zero, so the measured error has a prediction to meet.
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
LOG_RATE_STD = 0.5  # how far the drift bends the logarithm of a rate


class DriftingGenerator:
    """A generator that turns with the slow angle y: W_ij(y) = W_ij·exp(a_ij·cos y + b_ij·sin y).

    Zero rates stay zero, so W(y) is irreducible if W is. Time is measured in the slowest relaxation time on
    the circle (the smallest spectral gap is 1), so that a drift ω ≪ 1 is slow for every generator.
    """

    def __init__(self, W: Tensor, seed: int = 0, log_rate_std: float = LOG_RATE_STD) -> None:
        W = check_generator(W.cpu())
        if W.ndim != 2:
            raise InputError(
                f"the fast-slow system takes one generator, not a batch of shape {tuple(W.shape)}"
            )
        N = W.shape[-1]
        source = torch.Generator().manual_seed(seed)
        self.log_rate_coeffs = log_rate_std * torch.randn(2, N, N, generator=source, dtype=torch.float64)
        self.feedback = 2 * torch.rand(N, generator=source, dtype=torch.float64) - 1  # b: how x drives y
        self.rates = W - torch.diag_embed(W.diagonal())
        try:
            circle = torch.stack([check_generator(one) for one in self.at(circle_angles(64))])
        except InputError as error:
            raise InputError(f"with its rates bent by the drift of y, {error}") from None
        relaxation = torch.linalg.eigvals(circle).real.sort(-1).values[:, -2]
        self.rates = self.rates / -float(relaxation.max())

    @property
    def n_states(self) -> int:
        return self.rates.shape[-1]

    def at(self, y: Tensor) -> Tensor:
        """W(y) (..., N, N) at the angles y (...)."""
        return generator_from_rates(self._rates(y))

    def derivative(self, y: Tensor) -> Tensor:
        """dW/dy (..., N, N) at the angles y (...)."""
        y = y[..., None, None]
        return generator_from_rates(
            self._rates(y[..., 0, 0])
            * (self.log_rate_coeffs[1] * y.cos() - self.log_rate_coeffs[0] * y.sin())
        )

    def matvec(self, x: Tensor, y: Tensor) -> Tensor:
        """W(y)·x for one x (N,) and one y, without building the diagonal: the integrator's inner loop."""
        rates = self._rates(y)
        return rates @ x - rates.sum(0) * x

    def stationary(self, y: Tensor) -> Tensor:
        """The equilibrium manifold p_st(y) (..., N)."""
        return stationary_distribution(self.at(y), check=False)  # checked on the circle when this was made

    def _rates(self, y: Tensor) -> Tensor:
        y = y[..., None, None]
        return self.rates * (self.log_rate_coeffs[0] * y.cos() + self.log_rate_coeffs[1] * y.sin()).exp()


def circle_angles(n_points: int) -> Tensor:
    """Angles of `points` equally spaced points on the circle."""
    return torch.arange(n_points, dtype=torch.float64) * (2 * math.pi / n_points)


@dataclass(frozen=True)
class Trajectory:
    """One integrated path: the times of the integrator's own steps, x and y there, ‖x − p_st(y)‖₁ there."""

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
    """Integrate over one turn of y, from x = p_st(y) unless a `start` is given, in `points` steps or more.

    Radau IIA (order 5, L-stable) follows the slow manifold in steps the stiffness 1/ε does not bound; its
    error stays far below the distance measured, which shrinks with ε.
    """
    from scipy.integrate import solve_ivp

    if not (epsilon > 0 and drift > 0):
        raise InputError(f"epsilon and drift must be positive, not {epsilon:g} and {drift:g}")
    N, pull = generator.n_states, 0.5 * drift * generator.feedback
    duration = 2 * math.pi / drift

    def speed(t: float, z: Any) -> Any:
        z = torch.as_tensor(z)
        return torch.cat([generator.matvec(z[:N], z[N]) / epsilon, (drift + pull @ z[:N])[None]]).numpy()

    def jacobian(t: float, z: Any) -> Any:
        z = torch.as_tensor(z)
        fast = torch.cat([generator.at(z[N]), (generator.derivative(z[N]) @ z[:N])[:, None]], 1) / epsilon
        return torch.cat([fast, torch.cat([pull, pull.new_zeros(1)])[None]]).numpy()

    def turned(t: float, z: Any) -> float:
        return float(z[N] - 2 * math.pi)

    turned.terminal = True  # type: ignore[attr-defined]  # how scipy marks an event that ends the run
    y = torch.zeros(1, dtype=torch.float64)
    z = torch.cat([generator.stationary(y)[0] if x0 is None else x0, y]).numpy()
    options = {
        "rtol": 1e-8,
        "atol": 1e-11,
        "max_step": duration / min_steps,
    }  # so that no step misses the peak
    # y moves at ω/2 at least, so the turn ends within twice its mean duration
    path = solve_ivp(speed, (0.0, 2 * duration), z, method="Radau", jac=jacobian, events=turned, **options)
    if not path.success:
        raise RuntimeError(f"the integrator gave up at epsilon {epsilon:g}: {path.message}")
    x, y = torch.as_tensor(path.y[:N].T.copy()), torch.as_tensor(path.y[N].copy())
    distance = (x - generator.stationary(y)).abs().sum(-1)
    return Trajectory(epsilon, torch.as_tensor(path.t), x, y, distance)


def predicted_error_per_epsilon(generator: DriftingGenerator, drift: float, n_points: int = 512) -> float:
    """sup over the turn of ‖W#·ṗ_st‖₁: what error/ε tends to.

    W − 11ᵀ inverts W on vectors that sum to zero; differentiating W p_st = 0 gives ṗ_st = −W#·Ẇ·p_st.
    """
    y = circle_angles(n_points)
    factors = torch.linalg.lu_factor(generator.at(y) - 1.0)
    p = torch.linalg.lu_solve(*factors, -torch.ones(n_points, generator.n_states, 1, dtype=torch.float64))
    velocity = drift + 0.5 * drift * (generator.feedback @ p)[..., None]
    motion = -torch.linalg.lu_solve(*factors, generator.derivative(y) @ p) * velocity
    return float(torch.linalg.lu_solve(*factors, motion)[..., 0].abs().sum(-1).max())


@dataclass(frozen=True)
class Convergence:
    """How the distance from the equilibrium manifold shrinks with ε, and the order fitted to it."""

    trajectories: list[Trajectory]
    predicted_error_per_epsilon: float
    order: float

    @property
    def errors(self) -> dict[float, float]:
        return {path.epsilon: path.error for path in self.trajectories}


def fitted_order(epsilons: Sequence[float], errors: Sequence[float]) -> float:
    """The slope of log error against log ε, by least squares."""
    log_epsilon, log_error = torch.tensor(epsilons).double().log(), torch.tensor(errors).double().log()
    centred = log_epsilon - log_epsilon.mean()
    return float(centred @ log_error / (centred @ centred))


def measure_convergence(
    generator: DriftingGenerator,
    drift: float,
    epsilons: Sequence[float] = EPSILONS,
    min_steps: int = 200,
    callback: Callable[[Trajectory], None] = lambda path: None,
) -> Convergence:
    """Integrate for every ε; `each` is told of every path as it ends."""
    if len(set(epsilons)) < 2:
        raise InputError("an order needs at least two different values of epsilon")
    paths = []
    for epsilon in epsilons:
        paths.append(integrate(generator, epsilon, drift, min_steps=min_steps))
        callback(paths[-1])
    order = fitted_order(epsilons, [path.error for path in paths])
    return Convergence(paths, predicted_error_per_epsilon(generator, drift), order)
