"""Claims of Gahtan & Bronstein (arXiv 2604.01683, v1 and v2), and our evidence on them."""

from __future__ import annotations

from qkflow.papers.claims import Claim, Computed, Judged, Measured, Paired, compare_arms, find_arm
from qkflow.papers.costs import StudyCost
from qkflow.studies import Comparison
from qkflow.studies.design import Verdict
from qkflow.studies.stats import first_crossing, mean_curve

PAPER = "Gahtan & Bronstein, arXiv 2604.01683"
STUDY = "ingredients"
MUON = "{train.lr=0.012,train.optimizer=muon}@modern"
FAN_IN = "{train.lr=0.006}@fan_in"
REFERENCE = MUON.partition("@")[0]
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
    cells = {name: find_arm(comparison, name + FAN_IN).cell for name in ("standard", "euler")}
    curves = {
        name: mean_curve([run.curve() for run in comparison.compared_runs if run.cell == cell])
        for name, cell in cells.items()
    }
    _, budget, _, target = curves["standard"][-1]
    reached = first_crossing([row[1] for row in curves["euler"]], [row[3] for row in curves["euler"]], target)
    if reached is None:
        return "euler from fan_in does not reach the final loss of standard attention", False
    ratio = budget / reached
    return f"{ratio:.2f}× fewer tokens, both from fan_in", ratio >= PUBLISHED_TOKEN_RATIO


def _stability(comparison: Comparison) -> tuple[str, bool | None]:
    """Loss spikes, gradient tails and seed noise of euler beside standard attention, same init."""
    texts, better, worse = [], 0, 0
    for suffix, name in ((FAN_IN, "AdamW from fan_in"), (MUON, "Muon from modern")):
        standard = "standard" + (suffix if suffix == FAN_IN else REFERENCE)
        tails, spikes = [], []
        for arm in (find_arm(comparison, f"euler{suffix}"), find_arm(comparison, standard)):
            runs = [run for run in comparison.compared_runs if run.cell == arm.cell]
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


def _uncoupled(comparison: Comparison) -> tuple[str, bool | None]:
    """The uncoupled control has to gain less than the coupling."""
    difference, verdict = compare_arms(comparison, f"euler{FAN_IN}", f"uncoupled{FAN_IN}")
    own, _ = compare_arms(comparison, f"uncoupled{FAN_IN}", f"standard{FAN_IN}")
    ratio = find_arm(comparison, f"uncoupled{FAN_IN}").seed_variance_ratio
    percent, own_percent = difference.percent, own.percent
    text = (
        f"uncoupled against standard {own_percent['mean']:+.1f}%; euler against uncoupled "
        f"{percent['mean']:+.1f}% ({percent['low']:+.1f}…{percent['high']:+.1f}), {verdict}"
    )
    if ratio is not None:
        text += f"; seed variance {ratio.ratio:.2g}× that of the reference"
    supports = {Verdict.HELPS: True, Verdict.HURTS: False, Verdict.EQUIVALENT: False}.get(verdict)
    return text.replace("-", "−"), supports


CLAIMS = (
    Claim(
        "coupling-60m",
        PAPER,
        "Coupled dynamics lower perplexity at 60M parameters",
        "−6.6…−6.9% (24.22 → 22.55–22.62), WikiText-103",
        (
            Judged(
                STUDY,
                f"euler{FAN_IN}",
                Verdict.HELPS,
                "euler against standard, fan_in, AdamW",
                f"standard{FAN_IN}",
            ),
            Judged(STUDY, f"euler{MUON}", Verdict.HELPS, "euler against standard, modern, Muon"),
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
            Paired(
                STUDY,
                f"leapfrog:n=7{MUON}",
                f"euler{MUON}",
                Verdict.EQUIVALENT,
                "leapfrog with 7 steps against euler with 1, modern, Muon",
            ),
        ),
        to_settle=StudyCost("integrators", "step-counts"),
    ),
    Claim(
        "coupling-uncoupled",
        PAPER,
        "An uncoupled network with the same parameters gains less than the coupling",
        "23.81 against 22.55–22.62 (standard 24.22); 8× the seed variance",
        (Measured(STUDY, _uncoupled),),
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
            Judged(
                STUDY,
                f"differential{MUON}",
                Verdict.HELPS,
                "differential against standard, modern, Muon (learning rate of standard)",
            ),
        ),
        to_settle=StudyCost("coupling-350m"),
    ),
    Claim(
        "coupling-corpora",
        PAPER,
        "Coherent text gains, heterogeneous web text loses",
        "PubMed −4.5%, web +10.3%",
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
        (Measured(STUDY, _stability),),
    ),
    Claim(
        "coupling-v2",
        PAPER + " (v2)",
        "Affine coupling on differential attention beats differential attention",
        "455M, T = 512: p = 0.003, six seeds",
        (
            Judged(
                STUDY,
                f"affine+differential{MUON}",
                Verdict.HELPS,
                "affine + differential against differential, modern, Muon",
                f"differential{MUON}",
            ),
            Judged(STUDY, f"affine{MUON}", Verdict.HELPS, "affine against standard, modern, Muon"),
        ),
        to_settle=StudyCost("affine-differential-455m"),
    ),
)
