"""The answer in words, for a reader who asks: does this help on my corpus?"""

from __future__ import annotations

import math
from typing import Any

from qkflow.studies.stats import MIN_SEEDS_FOR_VERDICT

HELPS, HURTS, NO_EVIDENCE, NO_VERDICT, REFERENCE = "helps", "hurts", "no evidence", "no verdict", "reference"


_MATCH_PHRASES = {
    "tokens": "after equally many tokens",
    "time": "after equal time",
    "flops": "after equal compute",
}


def decide_verdict(difference: dict[str, Any] | None, confidence: float) -> str:
    """helps / hurts only if the paired difference survives Holm's correction."""
    if difference is None or difference["pairs"] < MIN_SEEDS_FOR_VERDICT or difference.get("p_holm") is None:
        return NO_VERDICT
    if difference["p_holm"] >= 1 - confidence:
        return NO_EVIDENCE
    return HELPS if difference["mean"] < 0 else HURTS


def percent_phrase(value: float) -> str:
    """`2.3% lower`, `0.40% higher`: perplexity against the reference."""
    size = abs(value)
    if size < 0.005:
        return "0.00%"
    if size >= 1e6:
        return "immeasurably higher" if math.isinf(size) else f"{size:.2g}% higher"
    digits = 2 if size < 1 else 1
    return f"{size:.{digits}f}% {'lower' if value < 0 else 'higher'}"


def interval_phrase(low: float, high: float) -> str:
    """`between 1.1% and 3.5% lower`, `between 1.2% lower and 0.5% higher`."""
    first, last = percent_phrase(low), percent_phrase(high)
    if first.rpartition(" ")[2] == last.rpartition(" ")[2]:
        small, large = (percent_phrase(value) for value in sorted((low, high), key=abs))
        return f"between {small.partition(' ')[0]} and {large}"
    return f"between {first} and {last}"


def _percent_bounds(difference: dict[str, Any]) -> dict[str, float]:
    """Mean, low and high in per cent; what was too large for a number is infinite here."""
    return {name: math.inf if value is None else value for name, value in difference["percent"].items()}


def comparison_phrase(value: float, baseline: str) -> str:
    """`2.3% lower than the best standard model's`."""
    if abs(value) < 0.005:
        return f"the same as {baseline}"
    return f"{percent_phrase(value)} than {baseline}"


def format_p_value(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def verdict_sentence(row: dict[str, Any], n_comparisons: int, config: dict[str, Any]) -> str:
    """One variant's verdict, then what it costs, then whether a free start does the same."""
    name, difference, verdict = row["variant"], row["difference"], row["verdict"]
    if row["role"] == "reference":
        return f"{name} from its best start ({row['best_init']}) is the reference."
    if verdict == REFERENCE:
        return f"{name} is the reference here: its best start is the standard model's best start."
    if difference is None:
        return f"{name}: no verdict, because no seed finished for both it and the reference."
    size, whose = _percent_bounds(difference), f"the best standard model's {_MATCH_PHRASES[config['match']]}"
    if difference["low"] is None:
        return (
            f"{name}: no verdict from one seed; its perplexity was {comparison_phrase(size['mean'], whose)}."
        )
    inside = f"{100 * config['confidence']:.3g}% interval: {interval_phrase(size['low'], size['high'])}; "
    inside += f"{difference['pairs']} paired seeds"
    if verdict == NO_VERDICT:
        why = "from so few seeds" if config["verdict"] else "was asked for"
        return f"{name}: no verdict {why}; its perplexity was {comparison_phrase(size['mean'], whose)} ({inside})."
    corrected = format_p_value(difference["p_holm"])
    corrected += f" corrected for {n_comparisons} comparisons" if n_comparisons > 1 else ""
    if verdict == NO_EVIDENCE:
        crosses = size["low"] <= 0 <= size["high"]
        why = "which is compatible with no difference" if crosses else "too little for so many comparisons"
        said = (
            f"{name}: no evidence at this size. Its perplexity was {comparison_phrase(size['mean'], whose)} "
        )
        said += f"({inside}), {why} ({corrected})."
    else:
        said = f"{name} {verdict}: its perplexity is {comparison_phrase(size['mean'], whose)} ({inside}; {corrected})."
    return " ".join([said, *_cost_sentences(row), *_control_sentences(row)])


def _cost_sentences(row: dict[str, Any]) -> list[str]:
    """What the same loss costs, where the variant got there at all."""
    tokens, seconds, step = row["tokens_to_target"], row["seconds_to_target"], row["step_time_ratio"]
    said = []
    if row["verdict"] == HELPS and tokens is not None and seconds is not None:
        said.append(
            f"It reached that model's final loss with {tokens:.2f}× its tokens and {seconds:.2f}× its time."
        )
    elif step is not None:
        said.append(f"A training step takes {step:.2f}× the standard time.")
    return said


def _control_sentences(row: dict[str, Any]) -> list[str]:
    """A gain is the variant's own only if no control does as well."""
    if row["verdict"] != HELPS:
        return []
    said, beaten = [], []
    for control, difference in row["against_controls"].items():
        size = _percent_bounds(difference)
        what = (
            "The symmetric start alone, which is free,"
            if control == "symmetric"
            else f"The control {control}"
        )
        if difference["verdict"] == HELPS:
            beaten.append(f"{control} ({abs(size['mean']):.2g}% lower)")
        elif difference["verdict"] == HURTS:
            said.append(f"{what} does better still: this is {percent_phrase(size['mean'])} than it.")
        elif difference["verdict"] == NO_EVIDENCE and difference["control_verdict"] == HELPS:
            said.append(
                f"{what} does as well, as far as these seeds can tell (against it: "
                f"{interval_phrase(size['low'], size['high'])}), so the gain may not be {row['variant']}'s own."
            )
    if beaten:
        said.append(f"It also beats the control{'s' * (len(beaten) > 1)} {_join_names(beaten)}.")
    return said


def headline(summary: dict[str, Any]) -> str:
    """The whole comparison in one or two sentences."""
    question, rows = summary["config"], summary["variants"]
    if summary["reference"] is None:
        return "No run of the standard model has finished yet, so there is nothing to compare with."
    groups: dict[str, list[str]] = {}
    for row in rows:
        size = _percent_bounds(row["difference"])["mean"] if row["difference"] else math.nan
        shown = f"{size:+.2g}" if size >= 1e6 else f"{size:+.1f}"
        sized = f"{row['variant']} (perplexity {shown}%)".replace("-", "−")
        shown = sized if row["verdict"] in (HELPS, HURTS) else row["variant"]
        groups.setdefault(row["verdict"], []).append(shown)
    parts = []
    if HELPS in groups:
        parts.append(f"{_join_names(groups[HELPS])} {_agree_verb(groups[HELPS], 'helps', 'help')}")
    if HURTS in groups:
        parts.append(f"{_join_names(groups[HURTS])} {_agree_verb(groups[HURTS], 'hurts', 'hurt')}")
    if NO_EVIDENCE in groups:
        parts.append(f"no evidence either way for {_join_names(groups[NO_EVIDENCE])}")
    if NO_VERDICT in groups:
        parts.append(f"no verdict on {_join_names(groups[NO_VERDICT])}")
    where = f"On {question['data']}, with a {question['preset']} model"
    return f"{where}: {'; '.join(parts)}." if parts else f"{where}: nothing was compared."


def _join_names(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _agree_verb(names: list[str], singular: str, plural: str) -> str:
    return singular if len(names) == 1 else plural
