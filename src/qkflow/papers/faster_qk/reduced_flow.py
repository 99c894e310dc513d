"""The reduced gradient flow of one attention layer, in closed form.

Vashisht & Ramaswamy (ICML 2026, arXiv 2608.06776) reduce a one-layer attention model to two scalars: μ_QK,
the score margin of the m relevant tokens over the n others, and μ_OV, the logit margin of the correct one of
M classes (b is a constant of their data, 50). With

    α = m·e^{μ_QK} / (m·e^{μ_QK} + n)      L = log(1 + (M−1)·e^{−α·μ_OV})      E = e^{α·μ_OV} + M − 1

gradient flow is

    dμ_OV/dt = η_OV · g_OV(μ_OV) · α / (b·E)
    dμ_QK/dt = η_QK · g_QK(μ_QK) · (M−1)·α·(1−α)·μ_OV / (M·b²·E)

where g = 1 for a collapsed circuit (one matrix). The balanced scalar mode μ = u·v, u = v, of a factorized
circuit follows du/dt = v·(−∂L/∂μ), so that g(μ) = u² + v² = 2μ: its effective learning rate grows with μ.
Zero is then a saddle, so a factorized circuit has a small positive initial value s.

Dividing the two equations eliminates time, α and E, and the variables separate. With c = m/n, r = η_QK/η_OV
and κ = r(M−1)/(M·b):

    ∫ (1 + c·e^μ)/g_QK(μ) dμ  over μ_QK   =   κ · ∫ μ/g_OV(μ) dμ  over μ_OV

| circuit    | left side, query-key                   | right side, output-value |
|------------|----------------------------------------|--------------------------|
| collapsed  | μ + c·(e^μ − 1)                        | κ·μ²/2                   |
| factorized | ½·[ln(μ/s) + c·(Ei(μ) − Ei(s))]        | κ·(μ − s)/2              |

Time is a quadrature along that curve. `ReducedFlow.integrate` solves the differential equations numerically;
it is the reference for the closed form.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qkflow.errors import InputError, unknown

Array = NDArray[np.float64]

KINDS = ("FAFO", "FACO", "CAFO", "CACO")  # Factorized or Collapsed Attention (QK), then Output (OV)

# End points printed by the authors' notebook (loss 1e-4, m=5, n=50, b=50, M=20, both circuits collapsed):
# ratio -> (μ_OV, μ_QK, α).
PUBLISHED_ENDPOINTS = {0.01: (81.669, 0.559, 0.149), 0.1: (42.282, 1.395, 0.287)}

MAX_EVALUATIONS = 200_000  # of the equations by `integrate`: seconds

_QUADRATURE_NODES, _QUADRATURE_WEIGHTS = np.polynomial.legendre.leggauss(12)


@dataclass(frozen=True)
class FlowPoint:
    """A point of a flow: μ_OV, μ_QK, attention on the relevant tokens, loss, and time in units of 1/η_OV."""

    mu_ov: float
    mu_qk: float
    alpha: float
    loss: float
    time: float


@dataclass(frozen=True)
class ReducedFlow:
    """A reduced flow with learning-rate ratio η_QK/η_OV; `init` is the initial μ of factorized circuits."""

    ratio: float = 1.0
    kind: str = "CACO"
    m: float = 5
    n: float = 50
    b: float = 50
    M: float = 20
    init: float = 1e-3

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("parameterization", self.kind, KINDS)
        for name in ("ratio", "m", "n", "b", "init"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InputError(
                    f"{name} must be a positive number, not {value:g}", code="option-not-positive"
                )
        if not (math.isfinite(self.M) and self.M > 1):
            raise InputError(
                f"M, the number of classes, must exceed 1, not {self.M:g}", code="too-few-classes"
            )

    @property
    def qk_factorized(self) -> bool:
        return self.kind.startswith("FA")

    @property
    def ov_factorized(self) -> bool:
        return self.kind.endswith("FO")

    @property
    def mu_ov_init(self) -> float:
        return self.init if self.ov_factorized else 0.0

    @property
    def mu_qk_init(self) -> float:
        return self.init if self.qk_factorized else 0.0

    def attention(self, mu_qk: Array | float) -> Array:
        """Return α, the attention on the relevant tokens."""
        return 1.0 / (1.0 + self.n / self.m * np.exp(-np.asarray(mu_qk, dtype=np.float64)))

    def loss(self, mu_ov: Array | float, mu_qk: Array | float) -> Array:
        return np.log1p((self.M - 1) * np.exp(-self.attention(mu_qk) * mu_ov))

    def rates(self, mu_ov: Array | float, mu_qk: Array | float) -> tuple[Array, Array]:
        """Return (dμ_OV/dt, dμ_QK/dt) by the equations above."""
        alpha = self.attention(mu_qk)
        decay = np.exp(-alpha * mu_ov)
        inverse_e = decay / (1 + (self.M - 1) * decay)  # 1/E without overflow
        g_ov = 2 * mu_ov if self.ov_factorized else 1.0
        g_qk = 2 * mu_qk if self.qk_factorized else 1.0
        ov = g_ov * alpha / self.b * inverse_e
        qk = self.ratio * g_qk * (self.M - 1) * alpha * (1 - alpha) * mu_ov / (self.M * self.b**2) * inverse_e
        return ov, qk

    def solve_mu_qk(self, mu_ov: Array | float) -> Array:
        """Return μ_QK as a function of μ_OV, by the closed form."""
        mu_ov = np.asarray(mu_ov, dtype=np.float64)
        kappa = self.ratio * (self.M - 1) / (self.M * self.b)
        progress = kappa * ((mu_ov - self.init) / 2 if self.ov_factorized else mu_ov**2 / 2)
        if self.qk_factorized:
            return _solve_factorized(progress, self.m / self.n, self.init)
        return _solve_collapsed(progress, self.m / self.n)

    def time_at(self, mu_ov: Array) -> Array:
        """Return the time of each of the ascending values `mu_ov`: ∫ dμ_OV / (dμ_OV/dt), by quadrature."""
        left = np.concatenate(([self.mu_ov_init], mu_ov[:-1]))
        half = (mu_ov - left) / 2
        nodes = left[:, None] + half[:, None] * (1 + _QUADRATURE_NODES)
        velocity, _ = self.rates(nodes, self.solve_mu_qk(nodes))
        return np.cumsum(half * (_QUADRATURE_WEIGHTS / velocity).sum(-1))

    def logit_at_loss(self, loss: float) -> float:
        """Return α·μ_OV at this loss."""
        initial = float(self.loss(self.mu_ov_init, self.mu_qk_init))
        if not 0 < loss < initial:
            raise InputError(
                f"loss must lie between 0 and the initial loss {initial:.6g}, not {loss:g}",
                code="loss-out-of-range",
            )
        return math.log((self.M - 1) / math.expm1(loss))

    def at_loss(self, loss: float) -> FlowPoint:
        """Return the point at this loss: a scalar root of the closed form, no integration."""
        from scipy.optimize import brentq

        logit = self.logit_at_loss(loss)
        upper = logit / float(self.attention(self.mu_qk_init))  # α never decreases

        def logit_gap(mu_ov: float) -> float:
            return float(self.attention(self.solve_mu_qk(mu_ov))) * mu_ov - logit

        lower = max(logit, self.mu_ov_init)
        try:
            mu_ov = brentq(logit_gap, lower, upper * (1 + 1e-12), xtol=1e-13, rtol=1e-15)
        except ValueError:  # NaN: a number beyond float64
            raise InputError(
                f"the flow with m={self.m:g}, n={self.n:g}, b={self.b:g}, M={self.M:g} and ratio "
                f"{self.ratio:g} cannot be computed in float64: use less extreme values",
                code="flow-out-of-range",
            ) from None
        return self._point(mu_ov)

    def trajectory(self, loss: float, n_points: int = 400) -> dict[str, Array]:
        """Return arrays (n_points,) of time, mu_ov, mu_qk, alpha and loss, from the init to `loss`."""
        end = self.at_loss(loss).mu_ov
        mu_ov = np.geomspace(self.mu_ov_init or end * 1e-5, end, n_points)[1 if self.ov_factorized else 0 :]
        time, mu_qk = self.time_at(mu_ov), self.solve_mu_qk(mu_ov)
        columns = {"time": time, "mu_ov": mu_ov, "mu_qk": mu_qk, "alpha": self.attention(mu_qk)}
        return columns | {"loss": self.loss(mu_ov, mu_qk)}

    def integrate(self, loss: float) -> FlowPoint:
        """Return the point at this loss by integrating the equations in log time (DOP853)."""
        from scipy.integrate import solve_ivp

        logit = self.logit_at_loss(loss)
        evaluations = itertools.count(1)

        def velocity(log_time: float, state: Array) -> list[float]:
            if next(evaluations) > MAX_EVALUATIONS:
                raise InputError(
                    f"the flow with ratio {self.ratio:g} is too stiff to integrate: leave --check out",
                    code="stiff-flow",
                )
            ov, qk = self.rates(state[0], state[1])
            return [float(ov) * math.exp(log_time), float(qk) * math.exp(log_time)]

        def logit_gap(log_time: float, state: Array) -> float:
            return float(self.attention(state[1]) * state[0]) - logit

        logit_gap.terminal = True  # type: ignore[attr-defined]
        log_t0 = -30.0  # t = e^-30 instead of 0: the circuits have changed by less than 1e-14
        solution = solve_ivp(
            velocity,
            (log_t0, 700.0),
            [self.mu_ov_init, self.mu_qk_init],
            method="DOP853",
            rtol=1e-13,
            atol=1e-15,
            first_step=0.1,
            events=logit_gap,
        )
        if not solution.t_events[0].size:
            raise InputError(
                f"the flow with ratio {self.ratio:g} does not reach loss {loss:g}", code="loss-not-reached"
            )
        mu_ov, mu_qk = (float(value) for value in solution.y_events[0][0])
        time = math.exp(solution.t_events[0][0])
        return FlowPoint(mu_ov, mu_qk, float(self.attention(mu_qk)), float(self.loss(mu_ov, mu_qk)), time)

    def _point(self, mu_ov: float) -> FlowPoint:
        mu_qk = float(self.solve_mu_qk(mu_ov))
        grid = np.geomspace(self.mu_ov_init or mu_ov * 1e-3, mu_ov, 400)
        time = float(self.time_at(grid[1:] if self.ov_factorized else grid)[-1])
        return FlowPoint(mu_ov, mu_qk, float(self.attention(mu_qk)), float(self.loss(mu_ov, mu_qk)), time)


def _solve_collapsed(progress: Array, c: float) -> Array:
    """Solve x + c·(e^x − 1) = progress: x = A − W₀(c·e^A), A = progress + c, W₀ the Lambert function.

    W₀(c·e^A) is Wright's ω(A + ln c), which cannot overflow. x = ln(ω/c) avoids the cancellation of A − W₀.
    One Newton step restores the relative accuracy for tiny x.
    """
    from scipy.special import wrightomega

    guess = np.log(wrightomega(progress + c + math.log(c)) / c)
    return guess - (guess + c * np.expm1(guess) - progress) / (1 + c * np.exp(guess))


def _solve_factorized(progress: Array, c: float, init: float) -> Array:
    """Solve ½·[ln(x/init) + c·(Ei(x) − Ei(init))] = progress by Newton's method in ln x.

    In ln x the left side is increasing and convex, so Newton converges monotonically from any upper bound of
    the root. Two bounds: x ≤ init·e^{2·progress}, since Ei increases; and, with K = ln x + c·Ei(x) at the
    root, x ≤ max(1, 1.6·ln(K/c)), since Ei(x) ≥ e^x/x and x − ln x ≥ x/1.6 beyond 1.
    """
    from scipy.special import expi

    total = 2 * progress + math.log(init) + c * float(expi(init))
    with np.errstate(divide="ignore"):
        bound = np.log(np.maximum(1.0, 1.6 * np.log(np.maximum(total / c, 1.0))))
    log_x = np.minimum(math.log(init) + 2 * progress, bound)
    for _ in range(100):
        x = np.exp(log_x)
        step = (log_x + c * expi(x) - total) / (1 + c * np.exp(x))
        log_x = log_x - step
        if np.all(np.abs(step) <= 4e-16 * np.maximum(1.0, np.abs(log_x))):
            break
    return np.exp(np.maximum(log_x, math.log(init)))
