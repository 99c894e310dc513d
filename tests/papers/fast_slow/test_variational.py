"""φ_θ: a distribution that descends to the exact one."""

import pytest
import torch

from qkflow.errors import InputError
from qkflow.papers.fast_slow.convergence import DriftingGenerator, circle_angles
from qkflow.papers.fast_slow.master_equation import random_generator
from qkflow.papers.fast_slow.variational import fit_stationary_net, kl_divergence, residual


def test_phi_comes_close_to_the_exact_solution_without_being_shown_it():
    generator = DriftingGenerator(random_generator(4, seed=1))
    told = []
    learnt = fit_stationary_net(
        generator, steps=300, hidden_dim=16, callback=lambda step, value: told.append((step, value))
    )
    assert learnt.steps[0] == 0
    assert learnt.steps[-1] == 300
    assert told == list(zip(learnt.steps, learnt.kl_mean, strict=True))
    assert learnt.kl_mean[0] > 1e-2
    assert learnt.kl_mean[-1] < 1e-3
    y = torch.rand(50).double() * 6
    p = learnt.phi(y).detach()
    torch.testing.assert_close(p.sum(-1), torch.ones(50).double())
    assert float(kl_divergence(generator.stationary(y), p).max()) < 1e-2


def test_the_same_seed_gives_the_same_phi_and_leaves_the_global_generator_alone():
    generator = DriftingGenerator(random_generator(3))
    before = torch.random.get_rng_state()
    first, second, other = (
        fit_stationary_net(generator, steps=5, hidden_dim=4, seed=seed) for seed in (1, 1, 2)
    )
    assert torch.equal(before, torch.random.get_rng_state())
    assert first.kl_mean == second.kl_mean != other.kl_mean


def test_the_residual_vanishes_at_the_exact_solution_alone():
    generator = DriftingGenerator(random_generator(5))
    W, p = generator.at(circle_angles(16)), generator.stationary(circle_angles(16))
    assert float(residual(W, p)) < 1e-28
    assert float(residual(W, p.roll(1, -1))) > 1e-3


def test_kl_of_known_distributions():
    p, q = torch.tensor([0.5, 0.5, 0.0]).double(), torch.tensor([0.25, 0.25, 0.5]).double()
    assert float(kl_divergence(p, q)) == pytest.approx(torch.tensor(2.0).log().item())
    assert float(kl_divergence(p, p)) == 0


def test_bad_settings_are_refused():
    with pytest.raises(InputError, match="positive steps"):
        fit_stationary_net(DriftingGenerator(random_generator(2)), steps=0)
