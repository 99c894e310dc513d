"""Claims of Gahtan & Bronstein (arXiv 2604.01683, v1 and v2), and our evidence on them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy.stats import f as f_distribution

from qkflow.papers.claims import Claim, Computed, Judged, Measured, Paired, find_arm
from qkflow.papers.costs import StudyCost
from qkflow.papers.coupled_dynamics.lr_limits import RECORD as LR_LIMITS
from qkflow.papers.coupled_dynamics.lr_limits import read_limits
from qkflow.studies import Comparison
from qkflow.studies.design import Verdict
from qkflow.studies.stats import first_crossing, mean_curve

PAPER = "Gahtan & Bronstein, arXiv 2604.01683"
STUDY = "ingredients"
# Arms of the stored study. Muon and `modern` are the best baseline, AdamW and `fan_in` a weak one.
MUON = "{train.lr=0.012,train.optimizer=muon}"
REFERENCE, EULER = f"standard{MUON}", f"euler{MUON}@modern"
WEAK_REFERENCE, WEAK_EULER = "standard{train.lr=0.006}@fan_in", "euler@fan_in"
WEAK_SYMMETRIC = "symmetric@fan_in"
ADAMW_MODERN = "standard{train.lr=0.003}@modern"
WEAK_DRIFT, WEAK_AFFINE = "drift@fan_in", "affine@fan_in"
LEAPFROG, SEVEN_STEPS, UNCOUPLED = "leapfrog@fan_in", "euler:n=7@fan_in", "uncoupled@fan_in"
AFFINE = f"affine{MUON}@modern"
DIFFERENTIAL, AFFINE_DIFFERENTIAL, DIFFERENTIAL_V2, SOFTMAX_NORM = (
    f"{name}{{train.optimizer=muon}}@modern"
    for name in ("differential", "affine+differential", "differential_v2", "softmax_norm")
)
SYMMETRIC, AFFINE_SYMMETRIC = (f"{name}{MUON}@modern+symmetric_score=1" for name in ("standard", "affine"))
# Stored studies of other corpora and budgets: the same arms, with the learning rates of WikiText-2.
CORPORA = {"biomedical": "biomedical sentences", "web": "web text"}
FIXED_EULER, FIXED_SYMMETRIC = "euler{train.lr=0.006}@fan_in", f"{WEAK_REFERENCE}+symmetric=1"
FIXED_DIFFERENTIAL = "differential{train.lr=0.006,train.optimizer=muon}@modern"
# Stored study of the symmetric init and of shorter steps, from fan_in with one rate.
CONTROLS_STUDY = "symmetric-controls"
SEVEN_SHORT_STEPS = "euler:n=7:step=0.0143{train.lr=0.006}@fan_in"
PUBLISHED_TOKEN_RATIO = 2.4
PUBLISHED_PARAMETERS = 0.0011  # of the 60M model
ROUNDING = 0.5e-4  # of the published share


def _extra_parameters() -> tuple[str, bool]:
    from qkflow.models import Decoder, preset

    sizes = [
        sum(
            p.numel()
            for p in Decoder(preset("60m", attention={"coupling": name}), device="meta").parameters()
        )
        for name in ("none", "euler:bias=false")
    ]
    share = (sizes[1] - sizes[0]) / sizes[0]
    return f"{sizes[1] - sizes[0]:,} of {sizes[0]:,}: +{share:.2%}", abs(
        share - PUBLISHED_PARAMETERS
    ) < ROUNDING


def _tokens_to_target(comparison: Comparison) -> tuple[str, bool | None]:
    """Tokens that euler needs for the final loss of standard attention, both from fan_in."""
    curves = [
        mean_curve([run.curve() for run in comparison.runs_of(find_arm(comparison, name).cell)])
        for name in (WEAK_REFERENCE, WEAK_EULER)
    ]
    _, budget, _, target = curves[0][-1]
    reached = first_crossing([row[1] for row in curves[1]], [row[3] for row in curves[1]], target)
    if reached is None:
        return "euler from fan_in does not reach the final loss of standard attention", False
    ratio = budget / reached
    return f"{ratio:.2f}× fewer tokens, both from fan_in", ratio >= PUBLISHED_TOKEN_RATIO


def _seed_variance(comparison: Comparison) -> tuple[str, bool | None]:
    """Variance over seeds of the uncoupled control against euler, with the interval of an F test."""
    losses = [np.array(find_arm(comparison, name).loss_by_seed) for name in (UNCOUPLED, WEAK_EULER)]
    ratio = float(losses[0].var(ddof=1) / losses[1].var(ddof=1))
    tail = (1 - comparison.summary.config.confidence) / 2
    degrees = (len(losses[0]) - 1, len(losses[1]) - 1)
    low, high = (ratio / f_distribution.ppf(q, *degrees) for q in (1 - tail, tail))
    supports = True if low > 1 else False if high < 1 else None
    return (
        f"variance of the loss over seeds, uncoupled over euler: {ratio:.2g}× ({low:.2g}…{high:.2g})",
        supports,
    )


def _stability(comparison: Comparison) -> tuple[str, bool | None]:
    """Loss spikes and gradient tails of euler beside standard attention with the same init and optimizer."""
    texts, better, worse = [], 0, 0
    pairs = {"AdamW from fan_in": (WEAK_EULER, WEAK_REFERENCE), "Muon from modern": (EULER, REFERENCE)}
    for name, arms in pairs.items():
        tails, spikes = [], []
        for arm in arms:
            runs = comparison.runs_of(find_arm(comparison, arm).cell)
            stability = [each for run in runs if (each := run.stability())]
            tails.append(sum(each.grad_norm_tail for each in stability) / len(stability))
            spikes.append(sum(each.spikes > 0 for each in stability))
        texts.append(
            f"{name}: runs with loss spikes {spikes[0]} against {spikes[1]}, gradient tail {tails[0]:.1f}× "
            f"against {tails[1]:.1f}×"
        )
        better += spikes[0] < spikes[1]
        worse += spikes[0] > spikes[1]
    return "; ".join(texts), None if better == worse else better > worse


def _largest_rates(comparison: Comparison) -> tuple[str, bool | None]:
    """The largest learning rate that trains, of euler beside standard attention."""
    limits = {limit.model: limit for limit in read_limits(comparison)}
    texts, better, worse = [], 0, 0
    for name, suffix in {"AdamW, fan_in": "@fan_in", "Muon, modern": "{train.optimizer=muon}@modern"}.items():
        euler, standard = (limits[f"{model}{suffix}"].largest.lr for model in ("euler", "standard"))
        texts.append(f"{name} {euler:g} against {standard:g}")
        better += euler > standard
        worse += euler < standard
    text = "largest learning rate that trains, euler against standard: " + "; ".join(texts)
    return text, None if better == worse else better > worse


def _corpus_evidence() -> Iterator[Judged]:
    """Yield the verdicts on euler that the claim predicts: helps on biomedical text, hurts on web text."""
    for (corpus, name), expects in zip(CORPORA.items(), (Verdict.HELPS, Verdict.HURTS), strict=True):
        study, label = f"corpus-{corpus}", f"{name}, euler against standard"
        yield Judged(study, FIXED_EULER, expects, f"{label}, fan_in, AdamW", WEAK_REFERENCE)
        yield Judged(study, EULER, expects, f"{label}, modern, Muon")


CLAIMS = (
    Claim(
        "coupling-60m",
        PAPER,
        "Coupled dynamics lower perplexity at 60M parameters",
        "−6.6…−6.9% (24.22 → 22.55–22.62), WikiText-103",
        (
            Judged(STUDY, WEAK_EULER, Verdict.HELPS, "euler against standard, fan_in, AdamW", WEAK_REFERENCE),
            Judged(STUDY, EULER, Verdict.HELPS, "euler against standard, modern, Muon"),
        ),
        to_settle=StudyCost("coupling-60m"),
    ),
    Claim(
        "coupling-parameters",
        PAPER,
        "The coupling adds next to no parameters",
        "+0.11%",
        (Computed("qkflow bench --level model", "60m", _extra_parameters),),
    ),
    Claim(
        "coupling-integrators",
        PAPER,
        "Euler and symplectic integrators do equally well, and 1 to 7 steps are alike",
        "Euler = leapfrog; steps 1–7 alike",
        (
            Paired(STUDY, LEAPFROG, WEAK_EULER, Verdict.EQUIVALENT, "leapfrog against euler, fan_in, AdamW"),
            Paired(
                STUDY, SEVEN_STEPS, WEAK_EULER, Verdict.EQUIVALENT, "euler, 7 steps against 1, fan_in, AdamW"
            ),
            Paired(
                CONTROLS_STUDY,
                SEVEN_SHORT_STEPS,
                FIXED_EULER,
                Verdict.EQUIVALENT,
                "euler, 7 steps of a seventh of the size against 1, fan_in, AdamW",
            ),
        ),
        to_settle=StudyCost("integrators", "step-counts"),
    ),
    Claim(
        "coupling-uncoupled",
        PAPER,
        "An uncoupled network with the same parameters gains less than the coupling",
        "23.81 against 22.55–22.62 (standard 24.22); 8× the seed variance",
        (
            Paired(STUDY, UNCOUPLED, WEAK_EULER, Verdict.HURTS, "uncoupled against euler, fan_in, AdamW"),
            Measured(STUDY, _seed_variance),
        ),
        to_settle=StudyCost("uncoupled"),
    ),
    Claim(
        "coupling-tokens",
        PAPER,
        "Standard attention needs 2.4 times as many tokens for the same perplexity, which takes equal time",
        "2.4×",
        (Measured(STUDY, _tokens_to_target),),
        to_settle=StudyCost("compute-matched"),
    ),
    Claim(
        "coupling-150m",
        PAPER,
        "The gain holds at 150M parameters",
        "−6.7%",
        to_settle=StudyCost("coupling-150m"),
    ),
    Claim(
        "coupling-350m",
        PAPER,
        "The gain shrinks at 350M parameters, where differential attention is ahead",
        "−1.0% (19.35); differential 18.93",
        (
            Judged(STUDY, DIFFERENTIAL, Verdict.HELPS, "differential against standard, modern, Muon"),
            Judged(
                "tokens-4M", FIXED_DIFFERENTIAL, Verdict.HELPS, "differential against standard, modern, Muon"
            ),
        ),
        to_settle=StudyCost("coupling-350m"),
    ),
    Claim(
        "coupling-corpora",
        PAPER,
        "Coherent text gains, heterogeneous web text loses",
        "PubMed −4.5%, web +10.3%",
        tuple(_corpus_evidence()),
        to_settle=StudyCost("pubmed", "web-text"),
    ),
    Claim(
        "coupling-glue",
        PAPER,
        "Fine-tuning on GLUE does not benefit",
        "no benefit",
        to_settle=StudyCost("glue"),
    ),
    Claim(
        "coupling-stability",
        PAPER,
        "Coupled dynamics train more stably",
        "more stable training",
        (Measured(STUDY, _stability), Measured(LR_LIMITS, _largest_rates)),
    ),
    Claim(
        "coupling-v2",
        PAPER + " (v2)",
        "Affine coupling on differential attention beats differential attention",
        "455M, T = 512: p = 0.003, six seeds",
        (
            Paired(
                STUDY,
                AFFINE_DIFFERENTIAL,
                DIFFERENTIAL,
                Verdict.HELPS,
                "affine + differential against differential, modern, Muon",
            ),
            Judged(STUDY, AFFINE, Verdict.HELPS, "affine against standard, modern, Muon"),
        ),
        to_settle=StudyCost("affine-differential-455m"),
    ),
)
