"""Claims of Gao (arXiv 2606.16730) on fast-slow coupling, and our evidence on them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from qkflow.papers.claims import Claim, Judged, Measured, Output, Paired, find_arm, find_row
from qkflow.papers.costs import StudyCost
from qkflow.studies import Comparison
from qkflow.studies.design import Verdict
from qkflow.studies.slow_path_findings import OPEN_GATE_THRESHOLD
from qkflow.studies.stats import t_interval

PAPER = "Gao, arXiv 2606.16730"
STUDY = "fast-slow"
MUON = "{train.lr=0.012,train.optimizer=muon}@modern"
THEORY = "qkflow timescale theory"
ORDER_TOLERANCE = 0.05
TIME_TOLERANCE = 0.1  # step times within 10% are comparable
MAX_KL = 1e-3  # nats: the fitted equilibrium counts as found


def _gate(comparison: Comparison, variant: str, label: str) -> tuple[str, bool | None]:
    """Share of the feedback in the residual stream at the last probe."""
    runs = comparison.runs_of(find_arm(comparison, f"{variant}{MUON}").cell)
    shares = np.array([max(run.metrics["probe"][-1]["slow_share"]) for run in runs])
    low, high, _ = t_interval(shares, comparison.summary.config.confidence)
    assert low is not None
    assert high is not None
    text = f"{label}: ‖g⊙ũ‖/‖x‖ at the end: {shares.mean():.3f} ({low:.3f}…{high:.3f})"
    is_closed = True if high < OPEN_GATE_THRESHOLD else False if low > OPEN_GATE_THRESHOLD else None
    return f"{text}; open means above {OPEN_GATE_THRESHOLD:g}", is_closed


def _order(output: Any) -> str:
    return f"fitted order {output['order']:.4f} over ε = 1/2 … 1/{round(1 / output['epsilons'][-1])}"


def _dense_row(output: Any) -> Any:
    """Return the time of a training step relative to that of a dense model with the same FLOPs."""
    return find_row(output["rows"], "against", "dense")


def _step_time(output: Any) -> str:
    row, rounds = _dense_row(output), output["environment"]["rounds"]
    return (
        f"training step, against a dense model with the same FLOPs: {row['ratio']:.3f}× "
        f"({row['low']:.3f}…{row['high']:.3f}, {rounds} rounds)"
    )


def _is_comparable(row: Any) -> bool | None:
    """Return whether the interval is within the tolerance, None if it crosses one of its bounds."""
    if row["low"] > 1 + TIME_TOLERANCE or row["high"] < 1 - TIME_TOLERANCE:
        return False
    return True if row["low"] > 1 - TIME_TOLERANCE and row["high"] < 1 + TIME_TOLERANCE else None


CLAIMS = (
    Claim(
        "fast-slow-neutral",
        PAPER,
        "At 500k tokens the slow path is neutral",
        "within run-to-run noise",
        (
            Judged(STUDY, f"slow{MUON}", Verdict.EQUIVALENT, "slow path against none, modern, Muon"),
            Judged(
                "fast-slow-pooling",
                f"slow:pool_after=1{MUON}",
                Verdict.EQUIVALENT,
                "slow path pooled after the first block against none, modern, Muon",
            ),
        ),
        to_settle=StudyCost("fast-slow"),
    ),
    Claim(
        "fast-slow-gate",
        PAPER,
        "At 500k tokens the gate stays closed",
        "gate closed",
        (
            Measured(STUDY, partial(_gate, variant="slow", label="pooled embeddings")),
            Measured(
                "fast-slow-pooling",
                partial(_gate, variant="slow:pool_after=1", label="pooled after one block"),
            ),
        ),
    ),
    Claim(
        "fast-slow-frozen",
        PAPER,
        "Training the slow path and freezing it end with the same perplexity",
        "coupled = frozen within noise",
        (
            Paired(
                STUDY,
                f"slow{MUON}",
                f"slow:frozen{MUON}",
                Verdict.EQUIVALENT,
                "trained against frozen slow weights",
            ),
        ),
    ),
    Claim(
        "fast-slow-time",
        PAPER,
        "Wall-clock time is comparable to a dense baseline",
        "≈ 0.97×",
        (
            Output(
                "slow-path-time",
                "python benchmarks/timescale.py",
                "4 fast and 2 slow layers, dim 512, P = 8, one machine",
                _step_time,
                lambda output: _is_comparable(_dense_row(output)),
            ),
        ),
    ),
    Claim(
        "fast-slow-order",
        PAPER,
        "The distance to the equilibrium manifold is of order ε",
        "O(ε)",
        (
            Output(
                "fast-slow-theory",
                THEORY,
                "6-state master equation",
                _order,
                lambda output: abs(output["order"] - 1) < ORDER_TOLERANCE,
            ),
        ),
    ),
    Claim(
        "fast-slow-variational",
        PAPER,
        "A softmax network fitted to the residual is a variational approximation of the equilibrium",
        "φ_θ(y) ≈ p_st(y)",
        (
            Output(
                "fast-slow-theory",
                THEORY,
                "6-state master equation",
                lambda output: f"mean KL to the stationary distribution {output['kl']['mean'][-1]:.1e} nats",
                lambda output: output["kl"]["mean"][-1] < MAX_KL,
            ),
        ),
    ),
)
