"""The findings of a study in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from qkflow.studies.config import ComparisonConfig, MatchMode
from qkflow.studies.design import Verdict
from qkflow.studies.plan import Metric
from qkflow.studies.power import MAX_SEEDS
from qkflow.studies.results import ArmSummary, CorrectedDifference, Power, StudySummary
from qkflow.studies.stats import PairedDifference

SCIENTIFIC_FROM = 1e9  # larger numbers are shown in scientific notation

_MATCH_PHRASES: dict[MatchMode, str] = {
    "tokens": "after equally many tokens",
    "time": "after equal time",
    "flops": "after equal compute",
}


def format_signed(value: float) -> str:
    """Format a percentage with its sign (a true minus) and three significant digits."""
    if abs(value) >= SCIENTIFIC_FROM:
        return f"{value:+.2g}"
    return (f"{value:+.1f}" if abs(value) >= 10 else f"{value:+.2f}").replace("-", "−")


def format_percent(value: float | None) -> str:
    return "–" if value is None else f"{format_signed(value)}%"


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


def verdict_sentence(
    arm: ArmSummary, n_comparisons: int, config: ComparisonConfig, metric: Metric = "perplexity"
) -> str:
    """Return the verdict of one arm, its cost, and whether a control explains it, in words."""
    name, difference = arm.variant, arm.difference
    if arm.role == "reference":
        return f"{name} with {arm.best_init} is the reference: the best baseline."
    if arm.verdict == Verdict.REFERENCE:
        return f"{name} is not tested: its best init is one of the baselines."
    if difference is None:
        return f"{name}: no verdict, because no seed finished for both it and the reference."
    size = _percent_bounds(difference)
    effect = comparison_phrase(size["mean"], f"the best baseline's {_MATCH_PHRASES[config.match]}")
    if difference.low is None:
        return f"{name}: no verdict from one seed; its {metric} was {effect}."
    interval = f"{100 * config.confidence:.3g}% interval: {interval_phrase(size['low'], size['high'])}"
    evidence = f"{interval}; {difference.pairs} paired seeds"
    if arm.verdict == Verdict.NO_VERDICT or arm.p_holm is None:
        return f"{name}: no verdict{_reason(arm, config)}; its {metric} was {effect} ({evidence})."
    corrected = f" corrected for {n_comparisons} comparisons" if n_comparisons > 1 else ""
    if arm.verdict == Verdict.EQUIVALENT:
        p = difference.p_equivalent_holm if isinstance(difference, CorrectedDifference) else None
        first = (
            f"{name} is equivalent within {config.margin:g}%: its {metric} is {effect} "
            f"({evidence}; {format_p_value(p or 0.0)}{corrected})."
        )
    elif arm.verdict == Verdict.UNDECIDED:
        first = (
            f"{name}: undecided. Its {metric} was {effect} ({evidence}; {format_p_value(arm.p_holm)}"
            f"{corrected}). {seeds_sentence(arm, difference)}"
        )
    else:
        p_text = f"{format_p_value(arm.p_holm)}{corrected}"
        first = f"{name} {arm.verdict}: its {metric} is {effect} ({evidence}; {p_text})."
    return " ".join([first, *_cost_sentences(arm), *_control_sentences(arm, config)])


def _reason(arm: ArmSummary, config: ComparisonConfig) -> str:
    """Return why there is no verdict."""
    if not config.verdict:
        return " requested"
    if arm.failed_seeds:
        return f", because judged runs failed (seeds {', '.join(map(str, arm.failed_seeds))})"
    return ", because its judged runs, or those of a rival baseline, have not all finished"


def seeds_sentence(arm: ArmSummary, difference: PairedDifference) -> str:
    """Return how many more seeds would decide an undecided arm."""
    if arm.seeds_to_decide is None:
        return f"If it is as large as it looks, even {MAX_SEEDS} seeds would not decide it."
    more = max(1, arm.seeds_to_decide - difference.pairs)
    return (
        f"If it is as large as it looks, {more} more seed{'s' * (more > 1)} would decide this: "
        f"a new study with {difference.pairs + more} seeds."
    )


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
        return [f"A training step takes {cost.step_time_ratio:.2f}× the time of the reference's."]
    return []


def _control_sentences(arm: ArmSummary, config: ComparisonConfig) -> list[str]:
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
        elif difference.p_noninferior is not None and difference.p_noninferior < 1 - config.confidence:
            sentences.append(
                f"{subject} is not inferior to it within {config.margin:g}% "
                f"({format_p_value(difference.p_noninferior)}), so the gain is not {arm.variant}'s own."
            )
        elif difference.verdict == Verdict.UNDECIDED and difference.control_verdict == Verdict.HELPS:
            interval = interval_phrase(size["low"], size["high"])
            sentences.append(
                f"{subject} does as well, as far as these seeds can tell (against it: {interval}), so the "
                f"gain may not be {arm.variant}'s own."
            )
    if beaten:
        sentences.append(f"It also beats the control{'s' * (len(beaten) > 1)} {_join_names(beaten)}.")
    return sentences


NOISE_FROM_PILOT = "--pilot FOLDER takes that of an earlier comparison"


def power_sentence(power: Power, noise_hint: str = NOISE_FROM_PILOT) -> str:
    """Return the smallest effect that a study can show; `noise_hint` tells how to name its noise."""
    tests = f"{power.n_comparisons} comparison{'s' * (power.n_comparisons != 1)}"
    start = f"With {power.seeds} seeds and {tests}, 80% power needs a difference of "
    if power.sd is None or power.detectable_percent is None:
        return (
            f"{start}{power.detectable_sd:.1f} standard deviations of the paired differences; their noise is "
            f"not known yet ({noise_hint})."
        )
    return f"{start}{power.detectable_percent:.2g}% (noise {100 * power.sd:.2g}%, from {power.source})."


def headline(summary: StudySummary) -> str:
    """Return the whole comparison in one or two sentences."""
    if summary.reference is None:
        return "No run of a baseline has finished yet, so there is nothing to compare with."
    groups: dict[Verdict, list[str]] = {}
    for arm in summary.variants:
        name = arm.variant
        if arm.verdict in (Verdict.HELPS, Verdict.HURTS) and arm.difference:
            size = _percent_bounds(arm.difference)["mean"]
            percent = f"{size:+.2g}" if size >= 1e6 else f"{size:+.1f}"
            name = f"{arm.variant} ({summary.metric} {percent}%)".replace(" -", " −").replace("(-", "(−")
        groups.setdefault(arm.verdict, []).append(name)
    parts = []
    for verdict, plural in ((Verdict.HELPS, "help"), (Verdict.HURTS, "hurt")):
        if names := groups.get(verdict):
            parts.append(f"{_join_names(names)} {verdict if len(names) == 1 else plural}")
    if names := groups.get(Verdict.EQUIVALENT):
        verb = "is" if len(names) == 1 else "are"
        margin = f"within {summary.config.margin:g}% of the best baseline"
        parts.append(f"{_join_names(names)} {verb} equivalent ({margin})")
    if names := groups.get(Verdict.UNDECIDED):
        parts.append(f"undecided for {_join_names(names)}")
    if names := groups.get(Verdict.NO_VERDICT):
        parts.append(f"no verdict on {_join_names(names)}")
    where = f"On {summary.config.data}, with a {summary.config.preset} model"
    return f"{where}: {'; '.join(parts)}." if parts else f"{where}: nothing was compared."


def _join_names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
