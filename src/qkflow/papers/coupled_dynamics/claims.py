"""Claims of Gahtan & Bronstein (arXiv 2604.01683, v1 and v2), and our evidence on them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy.stats import f as f_distribution

from qkflow.papers.claims import Claim, Computed, Judged, Measured, Output, Paired, find_arm
from qkflow.papers.costs import StudyCost
from qkflow.papers.coupled_dynamics.arms import (
    AFFINE_DIFFERENTIAL,
    CONTROLS_STUDY,
    DIFFERENTIAL,
    EULER,
    FIXED_DIFFERENTIAL,
    FIXED_EULER,
    LEAPFROG,
    PLAIN_DIFFERENTIAL,
    PLAIN_EULER,
    PLAIN_REFERENCE,
    REFERENCE,
    SEVEN_SHORT_STEPS,
    SEVEN_STEPS,
    STUDY,
    UNCOUPLED,
    WEAK_EULER,
    WEAK_REFERENCE,
)
from qkflow.papers.coupled_dynamics.lr_limits import RECORD as LR_LIMITS
from qkflow.papers.coupled_dynamics.lr_limits import read_limits
from qkflow.papers.coupled_dynamics.step_time import COMMAND, find_time, format_ratio
from qkflow.papers.coupled_dynamics.step_time import RECORD as STEP_TIME
from qkflow.papers.coupled_dynamics.token_budgets import EULER_GAIN, WEAK_EULER_GAIN, TokenFactor
from qkflow.studies import Comparison
from qkflow.studies.design import Verdict

PAPER = "Gahtan & Bronstein, arXiv 2604.01683"
CORPORA = {"biomedical": "biomedical sentences", "web": "web text"}
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
    text = (
        f"{sizes[1] - sizes[0]:,} of {sizes[0]:,}: +{share:.2%}, with the hidden size fitted to that figure"
    )
    return text, abs(share - PUBLISHED_PARAMETERS) < ROUNDING


def _coupled_time(output: Any) -> Any:
    return find_time(output, "euler", 1)


def _step_time(output: Any) -> str:
    """Time of the exact low-rank form, beside the textbook form of as many steps."""
    seven, textbook = (format_ratio(find_time(output, name, 7)) for name in ("leapfrog", "textbook leapfrog"))
    euler = format_ratio(_coupled_time(output))
    return f"euler {euler}; leapfrog with 7 steps {seven}, its textbook form {textbook}"


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
    """Runs with loss spikes, of euler beside standard attention with the same init and optimizer."""
    texts, better, worse = [], 0, 0
    pairs = {"AdamW, fan_in": (WEAK_EULER, WEAK_REFERENCE), "Muon, modern": (EULER, REFERENCE)}
    for name, arms in pairs.items():
        euler, standard = (
            sum(
                each.spikes > 0
                for run in comparison.runs_of(find_arm(comparison, arm).cell)
                if (each := run.stability())
            )
            for arm in arms
        )
        texts.append(f"{name} {euler} against {standard}")
        better += euler < standard
        worse += euler > standard
    text = "runs with loss spikes, euler against standard: " + "; ".join(texts)
    return text, None if better == worse else better > worse


def _largest_rates(comparison: Comparison) -> tuple[str, bool | None]:
    """The largest learning rate that trains, of euler beside standard attention."""
    limits = {limit.model: limit for limit in read_limits(comparison)}
    texts, better, worse = [], 0, 0
    for name, suffix in {"AdamW, fan_in": "@fan_in", "Muon, modern": "{train.optimizer=muon}@modern"}.items():
        euler, standard = (limits[f"{model}{suffix}"] for model in ("euler", "standard"))
        texts.append(f"{name} {euler} against {standard}")
        better += euler.largest.lr > standard.largest.lr
        worse += euler.largest.lr < standard.largest.lr
    text = "largest learning rate that trains, euler against standard: " + "; ".join(texts)
    return text, None if better == worse else better > worse


def _differential_evidence() -> Iterator[Paired]:
    """Yield differential scoring against euler on the tuned baseline, at every stored budget."""
    for study, arm in {
        "tokens-250k": FIXED_DIFFERENTIAL,
        "tokens-500k": FIXED_DIFFERENTIAL,
        STUDY: DIFFERENTIAL,
        "tokens-4M": FIXED_DIFFERENTIAL,
    }.items():
        yield Paired(study, arm, EULER, Verdict.HELPS, "differential against euler, modern, Muon")
    label = "differential against euler, modern, Muon, plain feed-forward"
    yield Paired("tokens-4M", PLAIN_DIFFERENTIAL, PLAIN_EULER, Verdict.HELPS, label)


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
            Paired(
                "tokens-4M",
                PLAIN_EULER,
                PLAIN_REFERENCE,
                Verdict.HELPS,
                "euler against standard, modern, Muon, plain feed-forward",
            ),
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
        "23.81 against 22.55–22.62 (standard 24.22)",
        (Paired(STUDY, UNCOUPLED, WEAK_EULER, Verdict.HURTS, "uncoupled against euler, fan_in, AdamW"),),
        to_settle=StudyCost("uncoupled"),
    ),
    Claim(
        "coupling-seed-variance",
        PAPER,
        "An uncoupled network varies more from seed to seed than the coupling",
        "8× the seed variance",
        (Measured(STUDY, _seed_variance),),
        to_settle=StudyCost("uncoupled"),
    ),
    Claim(
        "coupling-tokens",
        PAPER,
        "Standard attention needs 2.4 times the tokens of the coupling for the same perplexity",
        "2.4×",
        (
            TokenFactor("tokens-500k", WEAK_EULER_GAIN, PUBLISHED_TOKEN_RATIO),
            TokenFactor(STUDY, EULER_GAIN, PUBLISHED_TOKEN_RATIO),
        ),
        to_settle=StudyCost("compute-matched"),
    ),
    Claim(
        "coupling-time",
        PAPER,
        "A coupled token takes 2.4 times the training time of a standard one",
        "2.4× (follows from equal time at 2.4 times the tokens)",
        (
            Output(
                STEP_TIME,
                COMMAND,
                "training step of one block, dim 512, one CPU thread",
                _step_time,
                lambda output: _coupled_time(output)["high"] >= PUBLISHED_TOKEN_RATIO,
            ),
        ),
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
        "The gain shrinks at 350M parameters",
        "−1.0% (19.35)",
        to_settle=StudyCost("coupling-350m"),
    ),
    Claim(
        "coupling-differential",
        PAPER,
        "Differential attention is ahead of the coupling (at 350M parameters)",
        "18.93 against 19.35",
        tuple(_differential_evidence()),
        to_settle=StudyCost("differential"),
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
        ),
        to_settle=StudyCost("affine-differential-455m"),
    ),
)
