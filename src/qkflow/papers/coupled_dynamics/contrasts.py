"""Which ingredient does the work? Paired differences between two arms of the stored ingredients study.

A contrast changes one ingredient. The verdicts of all contrasts with the same optimizer are corrected
together (Holm). An arm without finished runs is shown as not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qkflow.papers.claims import Results, judge_pairs
from qkflow.papers.coupled_dynamics.arms import (
    AFFINE,
    AFFINE_DIFFERENTIAL,
    AFFINE_SYMMETRIC,
    CONTROLS_STUDY,
    DIFFERENTIAL,
    DIFFERENTIAL_V2,
    EULER,
    LEAPFROG,
    MUON,
    PLAIN_FFN,
    REFERENCE,
    SEVEN_SHORT_STEPS,
    SEVEN_STEPS,
    SOFTMAX_NORM,
    STUDY,
    SYMMETRIC,
    TUNED_PACE,
    TUNED_PLAIN_DIFFERENTIAL,
    TUNED_PLAIN_EULER,
    TUNED_PLAIN_REFERENCE,
    TUNED_STUDY,
    UNCOUPLED,
    WEAK_AFFINE,
    WEAK_DRIFT,
    WEAK_EULER,
    WEAK_REFERENCE,
    WEAK_SYMMETRIC,
)
from qkflow.report.document import format_count
from qkflow.report.tables import format_change
from qkflow.studies import Comparison

NOT_RUN = ("–", "not run")
FIXED_LR = "{train.lr=0.006}"  # of the study of the symmetric init
PLAIN = f"standard{FIXED_LR}"


def _controls_arm(name: str, init: str) -> str:
    return f"{name}{FIXED_LR}@fan_in{init}"


@dataclass(frozen=True)
class Contrast:
    """One ingredient: `arm` has it, `against` has not."""

    ingredient: str
    arm: str
    against: str


@dataclass(frozen=True)
class ContrastGroup:
    """Contrasts of one stored study, corrected together."""

    baseline: str
    study: str
    contrasts: tuple[Contrast, ...]


ADAMW_FAN_IN = (
    Contrast("euler coupling", WEAK_EULER, WEAK_REFERENCE),
    Contrast("its linear drift alone, q + Δ·k", WEAK_DRIFT, WEAK_REFERENCE),
    Contrast("the network f, added to the drift", WEAK_EULER, WEAK_DRIFT),
    Contrast("networks on q and k, uncoupled", UNCOUPLED, WEAK_REFERENCE),
    Contrast("leapfrog instead of euler", LEAPFROG, WEAK_EULER),
    Contrast("7 steps instead of 1, same step size", SEVEN_STEPS, WEAK_EULER),
    Contrast("affine coupling, identity at init", WEAK_AFFINE, WEAK_REFERENCE),
    Contrast("symmetric init, W_Q + W_K", WEAK_SYMMETRIC, WEAK_REFERENCE),
)
SYMMETRIC_CONTROLS = (
    Contrast("symmetric init, W_Q + W_K", _controls_arm("standard", "+symmetric=1"), PLAIN),
    Contrast("opposite sign, W_Q − W_K", _controls_arm("standard", "+symmetric=-1"), PLAIN),
    Contrast(
        "random partner of the same norm, W_Q + P", _controls_arm("standard", "+random_partner=1"), PLAIN
    ),
    Contrast("W_Q = W_K at init", _controls_arm("standard", "+tied_qk"), PLAIN),
    Contrast("W_Q = 0 at init", _controls_arm("standard", "+zero_q"), PLAIN),
    Contrast("mimetic init", _controls_arm("standard", "+mimetic"), PLAIN),
    Contrast(
        "7 steps instead of 1, same total time",
        SEVEN_SHORT_STEPS,
        _controls_arm("euler", ""),
    ),
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
# Stored study of the reference's init and optimizer, whose rate every arm has.
MODERN_CONTROLS = (
    Contrast("drift with Δ = 0 at init", "drift:step=0", "standard"),
    Contrast("drift with Δ = 1 at init", "drift:step=1", "standard"),
    Contrast("drift with Δ = 1, folded into W_Q after 20%", "drift:fold_at=0.2:step=1", "standard"),
    Contrast("conservative leapfrog (symplectic)", "leapfrog:conservative=true", "standard"),
    Contrast("euler coupling, 7 steps", "euler:n=7", "standard"),
    Contrast("symmetric init, score −1", "standard@modern+symmetric_score=-1", "standard"),
    Contrast("symmetric init, score 3", "standard@modern+symmetric_score=3", "standard"),
    Contrast("random partner as large as score 1, W_Q + P", "standard@modern+random_partner=0.5", "standard"),
    Contrast("W_Q = W_K at init", "standard@modern+tied_qk", "standard"),
    Contrast("W_Q = 0 at init", "standard@modern+zero_q", "standard"),
    Contrast("query-key normalization", "standard{attention.qk_norm=true}", "standard"),
)
# Stored study of the reference itself: its rate, schedule and feed-forward, and what pays with another one.
TUNED_BASELINE = (
    Contrast("learning rate 0.006 instead of 0.012", "standard{train.lr=0.006}", "standard"),
    Contrast("learning rate 0.024 instead of 0.012", "standard{train.lr=0.024}", "standard"),
    Contrast("warmup-stable-decay instead of cosine", "standard{train.schedule=wsd}", "standard"),
    Contrast("plain feed-forward of as many parameters (GELU)", TUNED_PLAIN_REFERENCE, "standard"),
    Contrast("increasing pace", TUNED_PACE, "standard"),
    Contrast("euler coupling, plain feed-forward", TUNED_PLAIN_EULER, TUNED_PLAIN_REFERENCE),
    Contrast("differential scoring, plain feed-forward", TUNED_PLAIN_DIFFERENTIAL, TUNED_PLAIN_REFERENCE),
    Contrast(
        "differential scoring, plain feed-forward, rate 0.006",
        f"differential{{{PLAIN_FFN},train.lr=0.006}}",
        TUNED_PLAIN_REFERENCE,
    ),
)
GROUPS = (
    ContrastGroup("AdamW, fan_in", STUDY, ADAMW_FAN_IN),
    ContrastGroup("AdamW, fan_in", CONTROLS_STUDY, SYMMETRIC_CONTROLS),
    ContrastGroup("Muon, modern", STUDY, MUON_MODERN),
    ContrastGroup("Muon, modern", "modern-controls", MODERN_CONTROLS),
    ContrastGroup("Muon, modern", TUNED_STUDY, TUNED_BASELINE),
)


@dataclass(frozen=True)
class InitByCoupling:
    """The four arms of a 2×2: the symmetric init or not, an affine coupling or not."""

    baseline: str
    study: str
    plain: str
    symmetric: str
    coupled: str
    both: str


INIT_BY_COUPLING = (
    InitByCoupling(
        "AdamW, fan_in",
        CONTROLS_STUDY,
        PLAIN,
        _controls_arm("standard", "+symmetric=1"),
        _controls_arm("affine", ""),
        _controls_arm("affine", "+symmetric=1"),
    ),
    InitByCoupling("Muon, modern", STUDY, REFERENCE, SYMMETRIC, AFFINE, AFFINE_SYMMETRIC),
)


def contrast_rows(results: Results) -> list[dict[str, str]]:
    """Return every contrast with its change of perplexity and verdict."""
    rows = []
    for group in GROUPS:
        comparison = results.comparison(group.study)
        judged = _judge(comparison, [(contrast.arm, contrast.against) for contrast in group.contrasts])
        for contrast in group.contrasts:
            change, verdict = judged.get((contrast.arm, contrast.against), NOT_RUN)
            row = {"on": group.baseline, "tokens": _tokens(comparison), "ingredient": contrast.ingredient}
            rows.append({**row, "change (95%)": change, "verdict": verdict})
    return rows


def init_by_coupling_rows(results: Results) -> list[dict[str, str]]:
    """Return the 2×2 of a symmetric init and a coupling that starts as the identity, for each baseline."""
    rows = []
    for each in INIT_BY_COUPLING:
        comparison = results.comparison(each.study)
        judged = _judge(comparison, [(each.coupled, each.plain), (each.both, each.symmetric)])
        pairs = (("as it is", each.plain, each.coupled), ("symmetric", each.symmetric, each.both))
        for init, plain, coupled in pairs:
            change, verdict = judged.get((coupled, plain), NOT_RUN)
            row = {"on": each.baseline, "tokens": _tokens(comparison), "init": init}
            row |= {"standard": _perplexity(comparison, plain)}
            row |= {"affine coupling": _perplexity(comparison, coupled)}
            rows.append({**row, "change by the coupling (95%)": change, "verdict": verdict})
    return rows


def _tokens(comparison: Comparison) -> str:
    return format_count(comparison.summary.config.tokens or 0)


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
