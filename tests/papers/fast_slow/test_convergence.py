"""The fast-slow system: the order of its limit, its constant, and an independent integration."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.errors import InputError
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


def test_the_distance_from_the_manifold_is_of_first_order():
    convergence = measure_convergence(DriftingGenerator(random_generator(6, seed=1)), 0.05, min_steps=60)
    assert list(convergence.errors) == list(EPSILONS)
    assert convergence.order == pytest.approx(1, abs=0.02)
    smallest = convergence.trajectories[-1]
    assert smallest.error / smallest.epsilon == pytest.approx(
        convergence.predicted_error_per_epsilon, rel=1e-3
    )


def test_a_fast_drift_is_not_yet_in_the_limit():
    """The order is measured, not assumed: where y outruns the relaxation, it is not one."""
    convergence = measure_convergence(
        DriftingGenerator(random_generator(6)), 20.0, EPSILONS[:3], min_steps=60
    )
    assert abs(convergence.order - 1) > 0.1


def test_the_path_equals_small_steps_of_the_matrix_exponential():
    generator, epsilon, drift = DriftingGenerator(random_generator(4, seed=2)), 0.5, 0.5
    path = integrate(generator, epsilon, drift)
    x, y, steps = generator.stationary(torch.zeros(1).double())[0], torch.zeros(()).double(), 4000
    step = float(path.t[-1]) / steps
    for _ in range(steps):  # Strang splitting, of second order
        y = y + step / 2 * drift * (1 + 0.5 * generator.feedback @ x)
        x = torch.matrix_exp(generator.at(y) * step / epsilon) @ x
        y = y + step / 2 * drift * (1 + 0.5 * generator.feedback @ x)
    assert float(path.y[-1]) == pytest.approx(2 * math.pi, abs=1e-8)
    assert float(y) == pytest.approx(2 * math.pi, abs=1e-5)
    torch.testing.assert_close(path.x[-1], x, rtol=0, atol=1e-6)


def test_a_path_stays_a_distribution_and_forgets_its_start():
    generator = DriftingGenerator(random_generator(5, seed=4))
    start = torch.zeros(5, dtype=torch.float64)
    start[0] = 1
    path = integrate(generator, 1 / 16, 0.05, x0=start, min_steps=60)
    torch.testing.assert_close(path.x.sum(-1), torch.ones(len(path.t)).double(), rtol=0, atol=1e-10)
    assert float(path.distance[0]) > 0.5
    late = path.distance[path.t > 1]  # sixteen relaxation times of the fast system
    assert float(late.max()) < 1.01 * predicted_error_per_epsilon(generator, 0.05) / 16


@given(st.integers(2, 6), st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_the_drift_keeps_what_makes_a_generator(states, seed):
    generator = DriftingGenerator(1e4 * random_generator(states, seed=seed), seed)
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


def test_zero_rates_stay_zero():
    ring = generator_from_rates(torch.eye(4, dtype=torch.float64).roll(1, 0))
    assert torch.equal(DriftingGenerator(ring).at(circle_angles(5)) == 0, (ring == 0).expand(5, 4, 4))


def test_fitted_order_is_the_slope_of_a_power_law():
    assert fitted_order(EPSILONS, [3 * e**1.7 for e in EPSILONS]) == pytest.approx(1.7)


def test_bad_input_is_refused():
    generator = DriftingGenerator(random_generator(3))
    with pytest.raises(InputError, match="must be positive"):
        integrate(generator, 0.5, -1.0)
    with pytest.raises(InputError, match="at least two"):
        measure_convergence(generator, 0.05, [0.5, 0.5])
    with pytest.raises(InputError, match="one generator"):
        DriftingGenerator(random_generator(3, (2,)))
    with pytest.raises(InputError, match="reducible"):
        DriftingGenerator(torch.zeros(3, 3))
    slow = 3e-8  # just well-conditioned, but not where the drift makes it slower still
    chain = torch.tensor([[0, 1, 0], [1, 0, slow], [0, slow, 0]], dtype=torch.float64)
    with pytest.raises(InputError, match="bent by the drift of y, the generator is ill-conditioned"):
        DriftingGenerator(generator_from_rates(chain))
