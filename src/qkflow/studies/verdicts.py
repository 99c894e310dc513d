"""Verdicts: `judge` is the only place where they are decided. Below it, their wording."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from qkflow.studies.config import ComparisonConfig, MatchMode
from qkflow.studies.results import (
    ArmSummary,
    ControlDifference,
    CorrectedDifference,
    StudySummary,
    Verdict,
)
from qkflow.studies.stats import (
    MIN_SEEDS_FOR_VERDICT,
    PairedDifference,
    holm_correction,
    paired_difference,
)


def judge(arms: Sequence[ArmSummary], config: ComparisonConfig) -> list[ArmSummary]:
    """Return the arms with Holm-corrected p-values, verdicts, differences to the controls and sentences.

    The first arm is the reference. Two kinds of tests are corrected, each family on its own: all other arms
    against the reference, and all other arms against one control. An arm whose best cell is the reference's
    own (`symmetric`, if that init is also in --inits) is the reference, and is not tested.
    """
    reference = arms[0].cell
    tested = correct_family({arm.variant: arm.difference for arm in arms if arm.cell != reference})
    judged = []
    for arm in arms:
        difference = tested.get(arm.variant, arm.difference)
        verdict = decide_verdict(difference, config.confidence) if config.verdict else Verdict.NO_VERDICT
        if arm.cell == reference:
            verdict = Verdict.REFERENCE
        judged.append(replace(arm, difference=difference, verdict=verdict))
    controls = [arm for arm in judged if arm.role == "control"]
    against = {control.variant: _compare_with_control(control, judged[1:], config) for control in controls}
    n_tests = sum(difference.p is not None for difference in tested.values())
    with_controls = [
        replace(
            arm, against_controls={name: d[arm.variant] for name, d in against.items() if arm.variant in d}
        )
        for arm in judged
    ]
    return [replace(arm, sentence=verdict_sentence(arm, n_tests, config)) for arm in with_controls]


def decide_verdict(difference: PairedDifference | None, confidence: float) -> Verdict:
    """Return helps or hurts only if the paired difference is significant after Holm's correction."""
    if not isinstance(difference, CorrectedDifference) or difference.p_holm is None:
        return Verdict.NO_VERDICT
    if difference.pairs < MIN_SEEDS_FOR_VERDICT:
        return Verdict.NO_VERDICT
    if difference.p_holm >= 1 - confidence:
        return Verdict.NO_EVIDENCE
    return Verdict.HELPS if difference.mean < 0 else Verdict.HURTS


def correct_family(differences: Mapping[str, PairedDifference | None]) -> dict[str, CorrectedDifference]:
    """Apply Holm's correction to differences that are tested together; arms without one are left out."""
    family = {name: difference for name, difference in differences.items() if difference is not None}
    p_values = holm_correction([difference.p for difference in family.values()])
    return {
        name: CorrectedDifference(**asdict(difference), p_holm=p)
        for (name, difference), p in zip(family.items(), p_values, strict=True)
    }


def _compare_with_control(
    control: ArmSummary, arms: Sequence[ArmSummary], config: ComparisonConfig
) -> dict[str, ControlDifference]:
    """Return the differences of all other arms to a control, by variant."""
    others = [arm for arm in arms if arm is not control]
    family = {arm.variant: arm_difference(arm, control, config.confidence) for arm in others}
    return {
        name: ControlDifference(
            **asdict(difference),
            verdict=decide_verdict(difference, config.confidence),
            control_verdict=control.verdict,
        )
        for name, difference in correct_family(family).items()
    }


def arm_difference(arm: ArmSummary, other: ArmSummary, confidence: float) -> PairedDifference | None:
    """Return the paired difference of two arms over the seeds that both finished."""
    seeds = sorted(arm.losses.keys() & other.losses.keys())
    if not seeds:
        return None
    losses, other_losses = ([side.losses[seed] for seed in seeds] for side in (arm, other))
    return paired_difference(losses, other_losses, confidence)


_MATCH_PHRASES: dict[MatchMode, str] = {
    "tokens": "after equally many tokens",
    "time": "after equal time",
    "flops": "after equal compute",
}


def percent_phrase(value: float) -> str:
    """Format a change of perplexity: `2.3% lower`, `0.40% higher`."""
    size = abs(value)
    if size < 0.005:
        return "0.00%"
    if size >= 1e6:
        return "immeasurably higher" if math.isinf(size) else f"{size:.2g}% higher"
    digits = 2 if size < 1 else 1
    return f"{size:.{digits}f}% {'lower' if value < 0 else 'higher'}"


def interval_phrase(low: float, high: float) -> str:
    """Format an interval: `between 1.1% and 3.5% lower`, `between 1.2% lower and 0.5% higher`."""
    first, last = percent_phrase(low), percent_phrase(high)
    if first.rpartition(" ")[2] == last.rpartition(" ")[2]:
        small, large = (percent_phrase(value) for value in sorted((low, high), key=abs))
        return f"between {small.partition(' ')[0]} and {large}"
    return f"between {first} and {last}"


def comparison_phrase(value: float, baseline: str) -> str:
    """Format a comparison: `2.3% lower than the best standard model's`."""
    if abs(value) < 0.005:
        return f"the same as {baseline}"
    return f"{percent_phrase(value)} than {baseline}"


def format_p_value(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def verdict_sentence(arm: ArmSummary, n_comparisons: int, config: ComparisonConfig) -> str:
    """Return the verdict of one arm, its cost, and whether a control explains it, in words."""
    name, difference = arm.variant, arm.difference
    if arm.role == "reference":
        return f"{name} at its best init ({arm.best_init}) is the reference."
    if arm.verdict == Verdict.REFERENCE:
        return f"{name} is the reference here: its best init is the standard model's best init."
    if difference is None:
        return f"{name}: no verdict, because no seed finished for both it and the reference."
    size = _percent_bounds(difference)
    effect = comparison_phrase(size["mean"], f"the best standard model's {_MATCH_PHRASES[config.match]}")
    if difference.low is None:
        return f"{name}: no verdict from one seed; its perplexity was {effect}."
    interval = f"{100 * config.confidence:.3g}% interval: {interval_phrase(size['low'], size['high'])}"
    evidence = f"{interval}; {difference.pairs} paired seeds"
    if arm.verdict == Verdict.NO_VERDICT or arm.p_holm is None:
        reason = "from so few seeds" if config.verdict else "requested"
        return f"{name}: no verdict {reason}; its perplexity was {effect} ({evidence})."
    corrected = format_p_value(arm.p_holm)
    corrected += f" corrected for {n_comparisons} comparisons" if n_comparisons > 1 else ""
    if arm.verdict == Verdict.NO_EVIDENCE:
        crosses_zero = size["low"] <= 0 <= size["high"]
        reason = "compatible with no difference" if crosses_zero else "too little for so many comparisons"
        first = f"{name}: no evidence at this size. Its perplexity was {effect} ({evidence}), "
        first += f"which is {reason} ({corrected})."
    else:
        first = f"{name} {arm.verdict}: its perplexity is {effect} ({evidence}; {corrected})."
    return " ".join([first, *_cost_sentences(arm), *_control_sentences(arm)])


def _percent_bounds(difference: PairedDifference) -> dict[str, float]:
    """Return mean, low and high in percent of perplexity; infinity where exp overflows."""
    return {name: math.inf if value is None else value for name, value in difference.percent.items()}


def _cost_sentences(arm: ArmSummary) -> list[str]:
    cost = arm.cost
    if (
        arm.verdict == Verdict.HELPS
        and cost.tokens_to_target is not None
        and cost.seconds_to_target is not None
    ):
        return [
            f"It reached that model's final loss with {cost.tokens_to_target:.2f}× its tokens and "
            f"{cost.seconds_to_target:.2f}× its time."
        ]
    if cost.step_time_ratio is not None:
        return [f"A training step takes {cost.step_time_ratio:.2f}× the standard time."]
    return []


def _control_sentences(arm: ArmSummary) -> list[str]:
    """Attribute a gain to the variant only where no control does as well."""
    if arm.verdict != Verdict.HELPS:
        return []
    sentences, beaten = [], []
    for control, difference in arm.against_controls.items():
        size = _percent_bounds(difference)
        subject = f"The control {control}"
        if control == "symmetric":
            subject = "The symmetric init alone, which is free,"
        if difference.verdict == Verdict.HELPS:
            beaten.append(f"{control} ({abs(size['mean']):.2g}% lower)")
        elif difference.verdict == Verdict.HURTS:
            sentences.append(f"{subject} does better still: this is {percent_phrase(size['mean'])} than it.")
        elif difference.verdict == Verdict.NO_EVIDENCE and difference.control_verdict == Verdict.HELPS:
            interval = interval_phrase(size["low"], size["high"])
            sentences.append(
                f"{subject} does as well, as far as these seeds can tell (against it: {interval}), so the "
                f"gain may not be {arm.variant}'s own."
            )
    if beaten:
        sentences.append(f"It also beats the control{'s' * (len(beaten) > 1)} {_join_names(beaten)}.")
    return sentences


def headline(summary: StudySummary) -> str:
    """Return the whole comparison in one or two sentences."""
    if summary.reference is None:
        return "No run of the standard model has finished yet, so there is nothing to compare with."
    groups: dict[Verdict, list[str]] = {}
    for arm in summary.variants:
        name = arm.variant
        if arm.verdict in (Verdict.HELPS, Verdict.HURTS) and arm.difference:
            size = _percent_bounds(arm.difference)["mean"]
            percent = f"{size:+.2g}" if size >= 1e6 else f"{size:+.1f}"
            name = f"{arm.variant} (perplexity {percent}%)".replace("-", "−")
        groups.setdefault(arm.verdict, []).append(name)
    parts = []
    for verdict, plural in ((Verdict.HELPS, "help"), (Verdict.HURTS, "hurt")):
        if names := groups.get(verdict):
            parts.append(f"{_join_names(names)} {verdict if len(names) == 1 else plural}")
    if names := groups.get(Verdict.NO_EVIDENCE):
        parts.append(f"no evidence either way for {_join_names(names)}")
    if names := groups.get(Verdict.NO_VERDICT):
        parts.append(f"no verdict on {_join_names(names)}")
    where = f"On {summary.config.data}, with a {summary.config.preset} model"
    return f"{where}: {'; '.join(parts)}." if parts else f"{where}: nothing was compared."


def _join_names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
