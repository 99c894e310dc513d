"""The reduced gradient flow of one attention layer, in closed form.

Vashisht & Ramaswamy (ICML 2026, arXiv 2608.06776) reduce a one-layer attention model to two numbers: μ_QK,
how strongly the query-key circuit prefers the m relevant tokens to the n others, and μ_OV, how strongly the
output-value circuit writes the right one of M classes (b is a constant of their data, 50). With

    α = m·e^{μ_QK} / (m·e^{μ_QK} + n)      L = log(1 + (M−1)·e^{−α·μ_OV})      E = e^{α·μ_OV} + M − 1

gradient flow is

    dμ_OV/dt = η_OV · g_OV(μ_OV) · α / (b·E)
    dμ_QK/dt = η_QK · g_QK(μ_QK) · (M−1)·α·(1−α)·μ_OV / (M·b²·E)

where g = 1 for a circuit that is one collapsed matrix. A factorised circuit's balanced scalar mode μ = u·v,
u = v, follows du/dt = v·(−∂L/∂μ), so that g(μ) = u² + v² = 2μ: its learning rate grows with what it has
learnt. Zero is then a saddle, so a factorised circuit starts at a small positive value s.

Dividing the two equations removes time, α and E, and what is left separates. With c = m/n, r = η_QK/η_OV and
κ = r(M−1)/(M·b):

    ∫ (1 + c·e^μ)/g_QK(μ) dμ  over μ_QK   =   κ · ∫ μ/g_OV(μ) dμ  over μ_OV

| circuit    | left side, query-key                   | right side, output-value |
|------------|----------------------------------------|--------------------------|
| collapsed  | μ + c·(e^μ − 1)                        | κ·μ²/2                   |
| factorised | ½·[ln(μ/s) + c·(Ei(μ) − Ei(s))]        | κ·(μ − s)/2              |

Time is a quadrature along that curve. Nothing here integrates a differential equation except
`Flow.integrate`, the reference the closed form is tested against.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qkflow.errors import InputError, unknown

Array = NDArray[np.float64]

KINDS = ("FAFO", "FACO", "CAFO", "CACO")  # Factorised or Collapsed: first Attention (QK), then Output (OV)

# End points printed by the authors' notebook (loss 1e-4, m=5, n=50, b=50, M=20, both circuits collapsed):
# ratio -> (μ_OV, μ_QK, α).
PUBLISHED_ENDPOINTS = {0.01: (81.669, 0.559, 0.149), 0.1: (42.282, 1.395, 0.287)}

_QUADRATURE_NODES, _QUADRATURE_WEIGHTS = np.polynomial.legendre.leggauss(12)


@dataclass(frozen=True)
class FlowPoint:
    """Where a flow stands: both circuits, attention on the relevant tokens, loss, time since the start."""

    mu_ov: float
    mu_qk: float
    alpha: float
    loss: float
    time: float


@dataclass(frozen=True)
class ReducedFlow:
    """One reduced flow. Time is counted in units of 1/η_OV; `start` is where factorised circuits begin."""

    ratio: float = 1.0
    kind: str = "CACO"
    m: float = 5
    n: float = 50
    b: float = 50
    M: float = 20
    init: float = 1e-3

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("parameterisation", self.kind, KINDS)
        for name in ("ratio", "m", "n", "b", "init"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InputError(f"{name} must be a positive number, not {value:g}")
        if not (math.isfinite(self.M) and self.M > 1):
            raise InputError(f"M counts the classes: it must be more than 1, not {self.M:g}")

    @property
    def qk_factorised(self) -> bool:
        return self.kind.startswith("FA")

    @property
    def ov_factorised(self) -> bool:
        return self.kind.endswith("FO")

    @property
    def mu_ov_init(self) -> float:
        return self.init if self.ov_factorised else 0.0

    @property
    def mu_qk_init(self) -> float:
        return self.init if self.qk_factorised else 0.0

    def attention(self, mu_qk: Array | float) -> Array:
        """α, the attention on the relevant tokens."""
        return 1.0 / (1.0 + self.n / self.m * np.exp(-np.asarray(mu_qk, dtype=np.float64)))

    def loss(self, mu_ov: Array | float, mu_qk: Array | float) -> Array:
        return np.log1p((self.M - 1) * np.exp(-self.attention(mu_qk) * mu_ov))

    def rates(self, mu_ov: Array | float, mu_qk: Array | float) -> tuple[Array, Array]:
        """(dμ_OV/dt, dμ_QK/dt), as the equations above say it."""
        alpha = self.attention(mu_qk)
        decay = np.exp(-alpha * mu_ov)
        inverse_e = decay / (1 + (self.M - 1) * decay)  # 1/E without overflow
        g_ov = 2 * mu_ov if self.ov_factorised else 1.0
        g_qk = 2 * mu_qk if self.qk_factorised else 1.0
        ov = g_ov * alpha / self.b * inverse_e
        qk = self.ratio * g_qk * (self.M - 1) * alpha * (1 - alpha) * mu_ov / (self.M * self.b**2) * inverse_e
        return ov, qk

    def solve_mu_qk(self, mu_ov: Array | float) -> Array:
        """μ_QK where the output-value circuit has reached `mu_ov`: the closed form."""
        mu_ov = np.asarray(mu_ov, dtype=np.float64)
        kappa = self.ratio * (self.M - 1) / (self.M * self.b)
        progress = kappa * ((mu_ov - self.init) / 2 if self.ov_factorised else mu_ov**2 / 2)
        if self.qk_factorised:
            return _solve_factorised(progress, self.m / self.n, self.init)
        return _solve_collapsed(progress, self.m / self.n)

    def time_at(self, mu_ov: Array) -> Array:
        """When each of the ascending values `mu_ov` is reached: ∫ dμ_OV / (dμ_OV/dt), by quadrature."""
        left = np.concatenate(([self.mu_ov_init], mu_ov[:-1]))
        half = (mu_ov - left) / 2
        nodes = left[:, None] + half[:, None] * (1 + _QUADRATURE_NODES)
        pace, _ = self.rates(nodes, self.solve_mu_qk(nodes))
        return np.cumsum(half * (_QUADRATURE_WEIGHTS / pace).sum(-1))

    def logit_at_loss(self, loss: float) -> float:
        """α·μ_OV where the loss is `loss`."""
        first = float(self.loss(self.mu_ov_init, self.mu_qk_init))
        if not 0 < loss < first:
            raise InputError(f"the loss must lie between 0 and its start, {first:.6g}, not at {loss:g}")
        return math.log((self.M - 1) / math.expm1(loss))

    def at_loss(self, loss: float) -> FlowPoint:
        """The point of this flow at a given loss: one root in one variable, no integration."""
        from scipy.optimize import brentq

        logit = self.logit_at_loss(loss)
        furthest = logit / float(self.attention(self.mu_qk_init))  # attention only ever sharpens

        def missing(mu_ov: float) -> float:
            return float(self.attention(self.solve_mu_qk(mu_ov))) * mu_ov - logit

        mu_ov = brentq(missing, max(logit, self.mu_ov_init), furthest * (1 + 1e-12), xtol=1e-13, rtol=1e-15)
        return self._point(mu_ov)

    def trajectory(self, loss: float, n_points: int = 400) -> dict[str, Array]:
        """The curve from the start down to `loss`: time, mu_ov, mu_qk, alpha, loss."""
        end = self.at_loss(loss).mu_ov
        mu_ov = np.geomspace(self.mu_ov_init or end * 1e-5, end, n_points)[1 if self.ov_factorised else 0 :]
        time, mu_qk = self.time_at(mu_ov), self.solve_mu_qk(mu_ov)
        columns = {"time": time, "mu_ov": mu_ov, "mu_qk": mu_qk, "alpha": self.attention(mu_qk)}
        return columns | {"loss": self.loss(mu_ov, mu_qk)}

    def integrate(self, loss: float) -> FlowPoint:
        """The same point by integrating the equations (DOP853 in log time): the reference of `at_loss`."""
        from scipy.integrate import solve_ivp

        logit = self.logit_at_loss(loss)

        def velocity(log_time: float, state: Array) -> list[float]:
            ov, qk = self.rates(state[0], state[1])
            return [float(ov) * math.exp(log_time), float(qk) * math.exp(log_time)]

        def missing(log_time: float, state: Array) -> float:
            return float(self.attention(state[1]) * state[0]) - logit

        missing.terminal = True  # type: ignore[attr-defined]
        first = -30.0  # t = e^-30 stands for 0: the circuits have moved by less than 1e-14
        run = solve_ivp(
            velocity,
            (first, 700.0),
            [self.mu_ov_init, self.mu_qk_init],
            method="DOP853",
            rtol=1e-13,
            atol=1e-15,
            first_step=0.1,
            events=missing,
        )
        if not run.t_events[0].size:
            raise InputError(f"the flow with ratio {self.ratio:g} never reaches loss {loss:g}")
        mu_ov, mu_qk = (float(value) for value in run.y_events[0][0])
        alpha = float(self.attention(mu_qk))
        return FlowPoint(mu_ov, mu_qk, alpha, float(self.loss(mu_ov, mu_qk)), math.exp(run.t_events[0][0]))

    def _point(self, mu_ov: float) -> FlowPoint:
        mu_qk = float(self.solve_mu_qk(mu_ov))
        grid = np.geomspace(self.mu_ov_init or mu_ov * 1e-3, mu_ov, 400)
        time = float(self.time_at(grid[1:] if self.ov_factorised else grid)[-1])
        return FlowPoint(mu_ov, mu_qk, float(self.attention(mu_qk)), float(self.loss(mu_ov, mu_qk)), time)


def _solve_collapsed(progress: Array, c: float) -> Array:
    """x with x + c·(e^x − 1) = progress: x = A − W₀(c·e^A), A = progress + c, W₀ the Lambert function.

    W₀(c·e^A) is Wright's ω(A + ln c), which takes the logarithm and so cannot overflow; x = ln(ω/c) is the
    same number without the difference of two large ones. One Newton step on the equation restores the
    relative accuracy of a tiny x.
    """
    from scipy.special import wrightomega

    guess = np.log(wrightomega(progress + c + math.log(c)) / c)
    return guess - (guess + c * np.expm1(guess) - progress) / (1 + c * np.exp(guess))


def _solve_factorised(progress: Array, c: float, init: float) -> Array:
    """x with ½·[ln(x/start) + c·(Ei(x) − Ei(start))] = progress, by Newton's method in ln x.

    In ln x the left side is increasing and convex, so Newton falls monotonically from any point above the
    root. Two such points: x ≤ start·e^{2·progress}, since Ei grows; and, with K = ln x + c·Ei(x) at the root,
    x ≤ max(1, 1.6·ln(K/c)), since Ei(x) ≥ e^x/x and x − ln x ≥ x/1.6 beyond 1.
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
