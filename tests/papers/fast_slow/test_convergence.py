"""The fast-slow system: order and constant of the error in ε, and an independent integration."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from input_errors import raises_code
from qkflow.papers.fast_slow.convergence import (
    EPSILONS,
    DriftingGenerator,
    circle_angles,
    fitted_order,
    integrate,
    measure_convergence,
    predicted_error_per_epsilon,
)
from qkflow.papers.fast_slow.master_equation import (
    generator_from_rates,
    random_generator,
    stationary_distribution,
)


def test_error_is_first_order_in_epsilon() -> None:
    convergence = measure_convergence(DriftingGenerator(random_generator(6, seed=1)), 0.05, min_steps=60)
    assert list(convergence.errors) == list(EPSILONS)
    assert convergence.order == pytest.approx(1, abs=0.02)
    smallest = convergence.trajectories[-1]
    assert smallest.error / smallest.epsilon == pytest.approx(
        convergence.predicted_error_per_epsilon, rel=1e-3
    )


def test_order_is_not_one_for_a_fast_drift() -> None:
    """If y moves faster than x relaxes, the measured order differs from 1."""
    convergence = measure_convergence(
        DriftingGenerator(random_generator(6)), 20.0, EPSILONS[:3], min_steps=60
    )
    assert abs(convergence.order - 1) > 0.1


def test_integrate_matches_matrix_exponential_splitting() -> None:
    generator, epsilon, drift = DriftingGenerator(random_generator(4, seed=2)), 0.5, 0.5
    trajectory = integrate(generator, epsilon, drift)
    x, y, steps = generator.stationary(torch.zeros(1).double())[0], torch.zeros(()).double(), 4000
    step = float(trajectory.t[-1]) / steps
    for _ in range(steps):  # Strang splitting, second order
        y = y + step / 2 * drift * (1 + 0.5 * generator.feedback @ x)
        x = torch.matrix_exp(generator.at(y) * step / epsilon) @ x
        y = y + step / 2 * drift * (1 + 0.5 * generator.feedback @ x)
    assert float(trajectory.y[-1]) == pytest.approx(2 * math.pi, abs=1e-8)
    assert float(y) == pytest.approx(2 * math.pi, abs=1e-5)
    torch.testing.assert_close(trajectory.x[-1], x, rtol=0, atol=1e-6)


def test_trajectory_stays_normalized_and_relaxes_from_x0() -> None:
    generator = DriftingGenerator(random_generator(5, seed=4))
    x0 = torch.zeros(5, dtype=torch.float64)
    x0[0] = 1
    trajectory = integrate(generator, 1 / 16, 0.05, x0=x0, min_steps=60)
    torch.testing.assert_close(
        trajectory.x.sum(-1), torch.ones(len(trajectory.t)).double(), rtol=0, atol=1e-10
    )
    assert float(trajectory.distance[0]) > 0.5
    late = trajectory.distance[trajectory.t > 1]  # sixteen relaxation times of the fast system
    assert float(late.max()) < 1.01 * predicted_error_per_epsilon(generator, 0.05) / 16


@given(st.integers(2, 6), st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_drifting_generator_is_a_generator_for_every_angle(n_states: int, seed: int) -> None:
    generator = DriftingGenerator(1e4 * random_generator(n_states, seed=seed), seed)
    y = circle_angles(64)
    W = generator.at(y)
    torch.testing.assert_close(generator.stationary(y), stationary_distribution(W, "bordered"))
    gaps = -torch.linalg.eigvals(W).real.sort(-1).values[:, -2]
    assert float(gaps.min()) == pytest.approx(1)
    x = generator.stationary(y[3])
    torch.testing.assert_close(generator.matvec(x, y[5]), W[5] @ x)
    h = 1e-6
    torch.testing.assert_close(
        generator.derivative(y), (generator.at(y + h) - generator.at(y - h)) / (2 * h), rtol=1e-5, atol=1e-6
    )


def test_zero_rates_stay_zero() -> None:
    ring = generator_from_rates(torch.eye(4, dtype=torch.float64).roll(1, 0))
    assert torch.equal(DriftingGenerator(ring).at(circle_angles(5)) == 0, (ring == 0).expand(5, 4, 4))


def test_fitted_order_of_a_power_law() -> None:
    assert fitted_order(EPSILONS, [3 * e**1.7 for e in EPSILONS]) == pytest.approx(1.7)


def test_invalid_input_raises() -> None:
    generator = DriftingGenerator(random_generator(3))
    with raises_code("option-not-positive"):
        integrate(generator, 0.5, -1.0)
    with raises_code("too-few-epsilons"):
        measure_convergence(generator, 0.05, [0.5, 0.5])
    with raises_code("generator-batch"):
        DriftingGenerator(random_generator(3, (2,)))
    with raises_code("reducible-generator"):
        DriftingGenerator(torch.zeros(3, 3))
    slow = 3e-8  # well-conditioned at first, but not for the angles where this rate is smaller
    chain = torch.tensor([[0, 1, 0], [1, 0, slow], [0, slow, 0]], dtype=torch.float64)
    with raises_code("ill-conditioned-generator"):
        DriftingGenerator(generator_from_rates(chain))
