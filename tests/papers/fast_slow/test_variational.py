"""φ_θ: training on the residual, determinism and the loss."""

from __future__ import annotations

import pytest
import torch

from input_errors import raises_code
from qkflow.papers.fast_slow.convergence import DriftingGenerator, circle_angles
from qkflow.papers.fast_slow.master_equation import random_generator
from qkflow.papers.fast_slow.variational import fit_stationary_net, kl_divergence, residual


def test_phi_converges_to_the_exact_solution() -> None:
    generator = DriftingGenerator(random_generator(4, seed=1))
    calls: list[tuple[int, float]] = []
    fit = fit_stationary_net(
        generator, steps=300, hidden_dim=16, callback=lambda step, value: calls.append((step, value))
    )
    assert fit.steps[0] == 0
    assert fit.steps[-1] == 300
    assert calls == list(zip(fit.steps, fit.kl_mean, strict=True))
    assert fit.kl_mean[0] > 1e-2
    assert fit.kl_mean[-1] < 1e-3
    y = torch.rand(50).double() * 6
    p = fit.phi(y).detach()
    torch.testing.assert_close(p.sum(-1), torch.ones(50).double())
    assert float(kl_divergence(generator.stationary(y), p).max()) < 1e-2


def test_same_seed_gives_the_same_fit_without_global_rng() -> None:
    generator = DriftingGenerator(random_generator(3))
    before = torch.random.get_rng_state()
    first, second, other = (
        fit_stationary_net(generator, steps=5, hidden_dim=4, seed=seed) for seed in (1, 1, 2)
    )
    assert torch.equal(before, torch.random.get_rng_state())
    assert first.kl_mean == second.kl_mean != other.kl_mean


def test_residual_is_zero_at_the_exact_solution_only() -> None:
    generator = DriftingGenerator(random_generator(5))
    W, p = generator.at(circle_angles(16)), generator.stationary(circle_angles(16))
    assert float(residual(W, p)) < 1e-28
    assert float(residual(W, p.roll(1, -1))) > 1e-3


def test_kl_of_known_distributions() -> None:
    p, q = torch.tensor([0.5, 0.5, 0.0]).double(), torch.tensor([0.25, 0.25, 0.5]).double()
    assert float(kl_divergence(p, q)) == pytest.approx(torch.tensor(2.0).log().item())
    assert float(kl_divergence(p, p)) == 0


def test_invalid_options_raise() -> None:
    with raises_code("option-not-positive"):
        fit_stationary_net(DriftingGenerator(random_generator(2)), steps=0)
