"""Verdicts: which arms help, hurt or are equivalent. `design` has the tests, `sentences` the wording."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np

from qkflow.studies.config import ComparisonConfig
from qkflow.studies.design import SeedDesign, TestResult, Verdict, decide
from qkflow.studies.plan import Metric
from qkflow.studies.power import seeds_to_decide
from qkflow.studies.results import ArmSummary, ControlDifference, CorrectedDifference
from qkflow.studies.screening import Screening
from qkflow.studies.sentences import verdict_sentence
from qkflow.studies.stats import MIN_SEEDS_FOR_VERDICT, PairedDifference, holm_correction

Races = Mapping[str, Screening]  # by variant


def judge(
    arms: Sequence[ArmSummary],
    races: Races,
    pool: Screening,
    config: ComparisonConfig,
    metric: Metric = "perplexity",
) -> list[ArmSummary]:
    """Return the arms with Holm-corrected p-values, verdicts, differences to the controls and sentences.

    The first arm is the reference. Two kinds of tests are corrected, each family on its own: all other arms
    against the reference, and all other arms against one control. Equivalence is a family of its own. An arm
    whose best cell is in the pool of baselines is not tested.
    """
    design, baselines = config.seed_design(), {cell.name for cell in pool.racing}
    tested = [arm for arm in arms[1:] if arm.cell not in baselines]
    n_tests = len(tested)
    family = correct_family({arm.variant: arm.difference for arm in tested}, n_tests)
    judged = [replace(arms[0], verdict=Verdict.REFERENCE)]
    for arm in arms[1:]:
        difference = family.get(arm.variant, arm.difference)
        verdict = Verdict.REFERENCE
        if arm in tested:
            verdict = _verdict(arm, arms[0], difference, config)
        needed = None
        if verdict == Verdict.UNDECIDED:
            needed = _seeds_to_decide(races[arm.variant], pool, n_tests, design)
        judged.append(replace(arm, difference=difference, verdict=verdict, seeds_to_decide=needed))
    controls = [arm for arm in judged if arm.role == "control"]
    against = {arm.variant: _compare_with_control(arm, judged[1:], races, config) for arm in controls}
    with_controls = [
        replace(
            arm, against_controls={name: d[arm.variant] for name, d in against.items() if arm.variant in d}
        )
        for arm in judged
    ]
    return [replace(arm, sentence=verdict_sentence(arm, n_tests, config, metric)) for arm in with_controls]


def _verdict(
    arm: ArmSummary, reference: ArmSummary, difference: PairedDifference | None, config: ComparisonConfig
) -> Verdict:
    """Return the verdict; where runs failed, the seeds that are left favor the side that failed."""
    if not config.verdict:
        return Verdict.NO_VERDICT
    verdict = decide_verdict(difference, config.confidence, config.seed_design().margin)
    favors_arm, favors_reference = bool(arm.failed_seeds), bool(reference.failed_seeds)
    if verdict == Verdict.EQUIVALENT and (favors_arm or favors_reference):
        return Verdict.NO_VERDICT
    if (verdict == Verdict.HELPS and favors_arm) or (verdict == Verdict.HURTS and favors_reference):
        return Verdict.NO_VERDICT
    return verdict


def decide_verdict(
    difference: PairedDifference | None, confidence: float, margin: float | None = None
) -> Verdict:
    """Return the verdict of a difference that was corrected together with its family."""
    if not isinstance(difference, CorrectedDifference) or difference.p_holm is None:
        return Verdict.NO_VERDICT
    if difference.pairs < MIN_SEEDS_FOR_VERDICT:
        return Verdict.NO_VERDICT
    p_equivalent = 1.0 if difference.p_equivalent_holm is None else difference.p_equivalent_holm
    numbers = (difference.p_holm, difference.direction, p_equivalent)
    result = TestResult(*(np.asarray(number) for number in numbers))
    design = SeedDesign.fixed(confidence, margin)
    return Verdict(str(decide(result, np.asarray(difference.mean), design)))


def correct_family(
    differences: Mapping[str, PairedDifference | None], planned: int = 0
) -> dict[str, CorrectedDifference]:
    """Apply Holm's correction to differences that are tested together; arms without one are left out.

    `planned` tests count, also those that have no p-value yet.
    """
    family = {name: difference for name, difference in differences.items() if difference is not None}
    p_values = holm_correction([difference.p for difference in family.values()], planned)
    p_equivalent = holm_correction([difference.p_equivalent for difference in family.values()], planned)
    return {
        name: CorrectedDifference(**asdict(difference), p_holm=p, p_equivalent_holm=equivalent)
        for (name, difference), p, equivalent in zip(family.items(), p_values, p_equivalent, strict=True)
    }


def _compare_with_control(
    control: ArmSummary, arms: Sequence[ArmSummary], races: Races, config: ComparisonConfig
) -> dict[str, ControlDifference]:
    """Return the differences of all other arms to a control, by variant."""
    design, race = config.seed_design(), races[control.variant]
    names = [arm.variant for arm in arms if arm is not control]
    family = correct_family({name: races[name].difference(race, design) for name in names}, len(names))
    noninferior = {name: _noninferiority_p(race, races[name], design) for name in family}
    corrected = dict(zip(noninferior, holm_correction([*noninferior.values()], len(names)), strict=True))
    return {
        name: ControlDifference(
            **asdict(difference),
            verdict=decide_verdict(difference, design.confidence, design.margin)
            if config.verdict
            else Verdict.NO_VERDICT,
            control_verdict=control.verdict,
            p_noninferior=corrected[name],
        )
        for name, difference in family.items()
    }


def _noninferiority_p(control: Screening, variant: Screening, design: SeedDesign) -> float | None:
    """Return p of the one-sided test that the control is worse than the variant by less than the margin."""
    differences = control.leader_differences(variant)
    if design.margin is None or not all(design.reached(len(d)) for d in differences):
        return None
    return float(design.p_less(differences, design.margin)[-1])


def _seeds_to_decide(race: Screening, pool: Screening, n_tests: int, design: SeedDesign) -> int | None:
    """Return the seeds with which a new study would decide this arm, if effect and noise are as observed."""
    below, above = race.leader_differences(pool), race.cell_differences(pool)
    worse = [-d for d in above]
    return seeds_to_decide(below if below[0].mean() < 0 else worse, [*below, *worse], n_tests, design)
