"""Verdicts: which arms help, hurt or are equivalent. `design` has the tests, `sentences` the wording."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np

from qkflow.studies.config import ComparisonConfig
from qkflow.studies.design import SeedDesign, Verdict, decide_one
from qkflow.studies.plan import Metric
from qkflow.studies.power import seeds_to_decide
from qkflow.studies.results import ArmSummary, ControlDifference, CorrectedDifference
from qkflow.studies.screening import paired_losses
from qkflow.studies.sentences import verdict_sentence
from qkflow.studies.stats import PairedDifference, holm_correction


def judge(
    arms: Sequence[ArmSummary], config: ComparisonConfig, design: SeedDesign, metric: Metric = "perplexity"
) -> list[ArmSummary]:
    """Return the arms with Holm-corrected p-values, verdicts, differences to the controls and sentences.

    The first arm is the reference. Two kinds of tests are corrected, each family on its own: all other arms
    against the reference, and all other arms against one control. Equivalence is a family of its own. An arm
    whose best cell is the reference's own (`symmetric`, if that init is also in --inits) is the reference,
    and is not tested.
    """
    reference = arms[0].cell
    tested = correct_family({arm.variant: arm.difference for arm in arms if arm.cell != reference})
    n_tests = sum(difference.p is not None for difference in tested.values())
    judged = []
    for arm in arms:
        difference = tested.get(arm.variant, arm.difference)
        verdict = decide_verdict(difference, config.confidence) if config.verdict else Verdict.NO_VERDICT
        if arm.cell == reference:
            verdict = Verdict.REFERENCE
        needed = None
        if verdict == Verdict.UNDECIDED and difference and difference.sd is not None:
            needed = seeds_to_decide(difference.mean, difference.sd, n_tests, design)
        judged.append(replace(arm, difference=difference, verdict=verdict, seeds_to_decide=needed))
    controls = [arm for arm in judged if arm.role == "control"]
    against = {control.variant: _compare_with_control(control, judged[1:], design) for control in controls}
    with_controls = [
        replace(
            arm, against_controls={name: d[arm.variant] for name, d in against.items() if arm.variant in d}
        )
        for arm in judged
    ]
    return [replace(arm, sentence=verdict_sentence(arm, n_tests, config, metric)) for arm in with_controls]


def decide_verdict(difference: PairedDifference | None, confidence: float) -> Verdict:
    """Return the verdict of a difference that was corrected together with its family."""
    if not isinstance(difference, CorrectedDifference):
        return Verdict.NO_VERDICT
    return decide_one(
        difference.p_holm, difference.p_equivalent_holm, difference.mean, difference.pairs, 1 - confidence
    )


def correct_family(differences: Mapping[str, PairedDifference | None]) -> dict[str, CorrectedDifference]:
    """Apply Holm's correction to differences that are tested together; arms without one are left out."""
    family = {name: difference for name, difference in differences.items() if difference is not None}
    p_values = holm_correction([difference.p for difference in family.values()])
    p_equivalent = holm_correction([difference.p_equivalent for difference in family.values()])
    return {
        name: CorrectedDifference(**asdict(difference), p_holm=p, p_equivalent_holm=equivalent)
        for (name, difference), p, equivalent in zip(family.items(), p_values, p_equivalent, strict=True)
    }


def _compare_with_control(
    control: ArmSummary, arms: Sequence[ArmSummary], design: SeedDesign
) -> dict[str, ControlDifference]:
    """Return the differences of all other arms to a control, by variant."""
    pairs = {arm.variant: paired_losses(arm.losses, control.losses) for arm in arms if arm is not control}
    pairs = {name: pair for name, pair in pairs.items() if pair[0]}
    family = correct_family({name: design.difference(*pair) for name, pair in pairs.items()})
    noninferior = {name: _noninferiority_p(*pair, design) for name, pair in pairs.items()}
    corrected = dict(zip(noninferior, holm_correction(list(noninferior.values())), strict=True))
    return {
        name: ControlDifference(
            **asdict(difference),
            verdict=decide_verdict(difference, design.confidence),
            control_verdict=control.verdict,
            p_noninferior=corrected[name],
        )
        for name, difference in family.items()
    }


def _noninferiority_p(variant: Sequence[float], control: Sequence[float], design: SeedDesign) -> float | None:
    """Return p of the one-sided test that the control is worse by less than the margin."""
    d = np.asarray(control) - np.asarray(variant)
    if design.margin is None or not design.reached(len(d)):
        return None
    return float(design.p_less(d, design.margin)[-1])
