"""Which ingredient does the work? Paired differences between two arms of the stored ingredients study.

A contrast changes one ingredient. The verdicts of all contrasts with the same optimizer are corrected
together (Holm). An arm without finished runs is shown as not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qkflow.papers.claims import Results, judge_pairs
from qkflow.papers.coupled_dynamics.claims import (
    AFFINE,
    AFFINE_DIFFERENTIAL,
    DIFFERENTIAL,
    DIFFERENTIAL_V2,
    EULER,
    LEAPFROG,
    MUON,
    REFERENCE,
    SEVEN_STEPS,
    SOFTMAX_NORM,
    STUDY,
    UNCOUPLED,
    WEAK_AFFINE,
    WEAK_DRIFT,
    WEAK_EULER,
    WEAK_REFERENCE,
    WEAK_SYMMETRIC,
)
from qkflow.report.tables import format_change
from qkflow.studies import Comparison

SEVEN_SHORT_STEPS = "euler{n=7,step=0.0143,train.lr=0.006}@fan_in"
WEAK_AFFINE_SYMMETRIC = "affine{train.lr=0.006}@fan_in+symmetric=1"
NOT_RUN = ("–", "not run")
SYMMETRIC, AFFINE_SYMMETRIC = (f"{name}{MUON}@modern+symmetric_score=1" for name in ("standard", "affine"))


@dataclass(frozen=True)
class Contrast:
    """One ingredient: `arm` has it, `against` has not."""

    ingredient: str
    arm: str
    against: str


ADAMW_FAN_IN = (
    Contrast("euler coupling", WEAK_EULER, WEAK_REFERENCE),
    Contrast("its linear drift alone, q + Δ·k", WEAK_DRIFT, WEAK_REFERENCE),
    Contrast("the network f, added to the drift", WEAK_EULER, WEAK_DRIFT),
    Contrast("networks on q and k, uncoupled", UNCOUPLED, WEAK_REFERENCE),
    Contrast("leapfrog instead of euler", LEAPFROG, WEAK_EULER),
    Contrast("7 steps instead of 1, same step size", SEVEN_STEPS, WEAK_EULER),
    Contrast("7 steps instead of 1, same total time", SEVEN_SHORT_STEPS, WEAK_EULER),
    Contrast("affine coupling, identity at init", WEAK_AFFINE, WEAK_REFERENCE),
    Contrast("symmetric init, W_Q + W_K", WEAK_SYMMETRIC, WEAK_REFERENCE),
    Contrast("opposite sign, W_Q − W_K", f"{WEAK_REFERENCE}+symmetric=-1", WEAK_REFERENCE),
    Contrast(
        "random partner of the same norm, W_Q + P", f"{WEAK_REFERENCE}+random_partner=1", WEAK_REFERENCE
    ),
    Contrast("W_Q = W_K at init", f"{WEAK_REFERENCE}+tied_qk", WEAK_REFERENCE),
    Contrast("W_Q = 0 at init", f"{WEAK_REFERENCE}+zero_q", WEAK_REFERENCE),
)
MUON_MODERN = (
    Contrast("euler coupling", EULER, REFERENCE),
    Contrast("affine coupling, identity at init", AFFINE, REFERENCE),
    Contrast("symmetric init, a token's score with itself 1", SYMMETRIC, REFERENCE),
    Contrast("nonlinear query, no coupling", f"nonlinear_query{MUON}@modern", REFERENCE),
    Contrast("differential scoring", DIFFERENTIAL, REFERENCE),
    Contrast("the norm of differential scoring alone", SOFTMAX_NORM, REFERENCE),
    Contrast("the difference of two softmax maps, added to the norm", DIFFERENTIAL, SOFTMAX_NORM),
    Contrast("differential scoring, V2", DIFFERENTIAL_V2, REFERENCE),
    Contrast("affine coupling on differential scoring", AFFINE_DIFFERENTIAL, DIFFERENTIAL),
)
CONTRASTS = {"AdamW, fan_in": ADAMW_FAN_IN, "Muon, modern": MUON_MODERN}

# The arms with neither, the start, the dynamics, and both.
START_BY_DYNAMICS = {
    "AdamW, fan_in": (WEAK_REFERENCE, WEAK_SYMMETRIC, WEAK_AFFINE, WEAK_AFFINE_SYMMETRIC),
    "Muon, modern": (REFERENCE, SYMMETRIC, AFFINE, AFFINE_SYMMETRIC),
}


def contrast_rows(results: Results) -> list[dict[str, str]]:
    """Return every contrast with its change of perplexity and verdict."""
    comparison = results.comparison(STUDY)
    rows = []
    for baseline, contrasts in CONTRASTS.items():
        judged = _judge(comparison, [(contrast.arm, contrast.against) for contrast in contrasts])
        for contrast in contrasts:
            change, verdict = judged.get((contrast.arm, contrast.against), NOT_RUN)
            row = {"on": baseline, "ingredient": contrast.ingredient, "change (95%)": change}
            rows.append({**row, "verdict": verdict})
    return rows


def start_by_dynamics_rows(results: Results) -> list[dict[str, str]]:
    """Return the 2×2 of a symmetric init and a coupling that starts as the identity, for each baseline."""
    comparison = results.comparison(STUDY)
    rows = []
    for baseline, (neither, start, dynamics, both) in START_BY_DYNAMICS.items():
        judged = _judge(comparison, [(dynamics, neither), (both, start)])
        for init, plain, coupled in (("as it is", neither, dynamics), ("symmetric", start, both)):
            change, verdict = judged.get((coupled, plain), NOT_RUN)
            row = {"on": baseline, "init": init, "standard": _perplexity(comparison, plain)}
            row |= {"affine coupling": _perplexity(comparison, coupled)}
            rows.append({**row, "change by the coupling (95%)": change, "verdict": verdict})
    return rows


def _judge(
    comparison: Comparison, pairs: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], tuple[str, str]]:
    """Return change and verdict as text, of the pairs whose arms are in the study."""
    in_study = {arm.variant for arm in comparison.summary.arms}
    judged = judge_pairs(comparison, [pair for pair in pairs if in_study.issuperset(pair)])
    return {pair: (format_change(difference), str(verdict)) for pair, (difference, verdict) in judged.items()}


def _perplexity(comparison: Comparison, name: str) -> str:
    arms = [arm for arm in comparison.summary.arms if arm.variant == name and arm.losses]
    return f"{np.exp(np.mean(arms[0].loss_by_seed)):.1f}" if arms else "not run"
