"""The closed form of the reduced flow against integration and autograd, and its numerical range."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from input_errors import raises_code
from qkflow.papers.faster_qk.reduced_flow import KINDS, PUBLISHED_ENDPOINTS, ReducedFlow


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ratio", [1e-4, 1e-2, 1.0, 1e2, 1e4])
def test_closed_form_matches_integration(kind: str, ratio: float) -> None:
    flow = ReducedFlow(ratio, kind)
    closed, integrated = flow.at_loss(1e-4), flow.integrate(1e-4)
    for name in ("mu_ov", "mu_qk", "alpha", "loss"):
        assert getattr(closed, name) == pytest.approx(getattr(integrated, name), abs=1e-8), name
    assert closed.time == pytest.approx(integrated.time, rel=1e-8)
    assert closed.loss == pytest.approx(1e-4, rel=1e-12)


def test_closed_form_with_other_constants() -> None:
    flow = ReducedFlow(3.0, "FAFO", m=2, n=7, b=11, M=4, init=1e-5)
    closed, integrated = flow.at_loss(1e-3), flow.integrate(1e-3)
    assert closed.mu_qk == pytest.approx(integrated.mu_qk, abs=1e-8)
    assert closed.mu_ov == pytest.approx(integrated.mu_ov, abs=1e-8)


@pytest.mark.parametrize(("ratio", "published"), PUBLISHED_ENDPOINTS.items())
def test_published_end_points(ratio: float, published: tuple[float, float, float]) -> None:
    end = ReducedFlow(ratio).at_loss(1e-4)
    # The authors' notebook stops at the first step below the loss, hence the tolerance.
    assert (end.mu_ov, end.mu_qk, end.alpha) == pytest.approx(published, abs=1.1e-3)


def test_rates_match_autograd() -> None:
    """Both rates are −∂L/∂μ times a constant: 1/((M−1)·b) for OV, r/(M·b²) for QK."""
    flow = ReducedFlow(3.0)
    mu = torch.tensor([2.5, 0.7], dtype=torch.float64, requires_grad=True)
    weight = flow.m * mu[1].exp()
    alpha = weight / (weight + flow.n)
    loss = torch.log1p((flow.M - 1) * torch.exp(-alpha * mu[0]))
    (gradient,) = torch.autograd.grad(loss, mu)
    ov, qk = flow.rates(2.5, 0.7)
    assert float(ov) == pytest.approx(-gradient[0].item() / ((flow.M - 1) * flow.b), rel=1e-12)
    assert float(qk) == pytest.approx(-flow.ratio * gradient[1].item() / (flow.M * flow.b**2), rel=1e-12)


@pytest.mark.parametrize("circuit", ["ov", "qk"])
def test_factorized_rate_matches_two_balanced_factors(circuit: str) -> None:
    """d(uv)/dt = u·dv/dt + v·du/dt with u = v = √μ where each factor follows its gradient."""
    mu_ov, mu_qk = 2.5, 0.7
    index = 0 if circuit == "ov" else 1
    collapsed = float(ReducedFlow(3.0, "CACO").rates(mu_ov, mu_qk)[index])
    factor = math.sqrt((mu_ov, mu_qk)[index])
    product_rate = factor * (factor * collapsed) + factor * (factor * collapsed)
    factorized = ReducedFlow(3.0, "CAFO" if circuit == "ov" else "FACO").rates(mu_ov, mu_qk)[index]
    assert float(factorized) == pytest.approx(product_rate, rel=1e-12)


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    ratio=st.floats(1e-4, 1e4),
    mu_ov=st.floats(1e-2, 1e6),
    m=st.floats(0.1, 1e3),
    n=st.floats(0.1, 1e3),
)
def test_solve_mu_qk_satisfies_the_separated_equation(
    kind: str, ratio: float, mu_ov: float, m: float, n: float
) -> None:
    """Both sides of the separated equation agree, without overflow for large A."""
    from scipy.special import expi

    flow = ReducedFlow(ratio, kind, m=m, n=n)
    mu_qk = float(flow.solve_mu_qk(mu_ov))
    c, s = m / n, flow.init
    kappa = ratio * (flow.M - 1) / (flow.M * flow.b)
    right = kappa * ((mu_ov - s) / 2 if flow.ov_factorized else mu_ov**2 / 2)
    if flow.qk_factorized:
        left = (math.log(mu_qk / s) + c * (float(expi(mu_qk)) - float(expi(s)))) / 2
    else:
        left = mu_qk + c * math.expm1(mu_qk)
    assert math.isfinite(mu_qk)
    assert left == pytest.approx(right, rel=1e-9, abs=1e-12 + 1e-14 * c)  # c·Ei cancels where x ≈ s


def test_solve_mu_qk_is_accurate_for_tiny_values() -> None:
    mu_ov = 1e-6  # e^A − 1 ≈ 1e-14: A − W₀(c·e^A) has two correct digits
    flow = ReducedFlow(1.0)
    kappa = (flow.M - 1) / (flow.M * flow.b)
    assert float(flow.solve_mu_qk(mu_ov)) == pytest.approx(kappa * mu_ov**2 / 2 / 1.1, rel=1e-9)


def test_alpha_grows_with_the_ratio() -> None:
    ends = [ReducedFlow(ratio).at_loss(1e-4) for ratio in (0.01, 0.1, 1, 10, 100)]
    assert [end.alpha for end in ends] == sorted(end.alpha for end in ends)
    assert [end.mu_ov for end in ends] == sorted((end.mu_ov for end in ends), reverse=True)


@pytest.mark.parametrize("kind", KINDS)
def test_trajectory_ends_at_the_end_point(kind: str) -> None:
    flow = ReducedFlow(2.0, kind)
    trajectory, end = flow.trajectory(1e-3, n_points=150), flow.at_loss(1e-3)
    assert trajectory["mu_qk"][-1] == pytest.approx(end.mu_qk, rel=1e-12)
    assert trajectory["time"][-1] == pytest.approx(end.time, rel=1e-6)
    assert np.all(np.diff(trajectory["time"]) > 0)
    assert np.all(np.diff(trajectory["loss"]) < 0)


@pytest.mark.parametrize(
    "constants", [{"ratio": 0.0}, {"ratio": -1.0}, {"ratio": math.nan}, {"n": 0}, {"M": 1}]
)
def test_invalid_constants_raise(constants: dict[str, float]) -> None:
    with raises_code("too-few-classes" if "M" in constants else "option-not-positive") as error:
        ReducedFlow(**constants)  # type: ignore[arg-type]
    assert next(iter(constants)) in str(error.value)


def test_invalid_kind_and_loss_raise() -> None:
    with raises_code("unknown-parameterization"):
        ReducedFlow(1.0, "FACP")
    for loss in (0.0, 3.0, math.nan):
        with raises_code("loss-out-of-range"):
            ReducedFlow().at_loss(loss)


def test_stiff_flow_is_not_integrated_for_ever() -> None:
    with raises_code("stiff-flow"):
        ReducedFlow(1e23).integrate(1e-4)
