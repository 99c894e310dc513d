"""The main findings of this project, one sentence each, with their numbers from stored results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qkflow.papers.claims import Results, compare_arms, describe_scale, find_arm, judged_difference
from qkflow.papers.coupled_dynamics.arms import (
    ADAMW_MODERN,
    EULER,
    FIXED_DIFFERENTIAL,
    PLAIN_DIFFERENTIAL,
    PLAIN_EULER,
    PLAIN_REFERENCE,
    REFERENCE,
    WEAK_DRIFT,
    WEAK_EULER,
    WEAK_REFERENCE,
    WEAK_SYMMETRIC,
)
from qkflow.papers.faster_qk.claims import read_change
from qkflow.report.document import format_count
from qkflow.report.tables import format_change
from qkflow.studies import Comparison
from qkflow.studies.blocked import BlockedDifference
from qkflow.studies.design import Verdict
from qkflow.studies.stats import PairedDifference

# task and ratio of the pace studies
PACE_SHARPENS = (("agreement", "3"), ("hatexplain", "10"), ("squad", "10"))
PACE_COSTS = (("agreement", "3"), ("agreement", "10"), ("hatexplain", "30"), ("squad", "10"))
TASK_NAMES = {"agreement": "agreement", "hatexplain": "HateXplain", "squad": "SQuAD"}


@dataclass(frozen=True)
class Finding:
    title: str
    text: str


def main_findings(results: Results) -> list[Finding]:
    """Return the findings of the README, in order of importance."""
    study = results.comparison("ingredients")
    longest, flops = results.comparison("tokens-4M"), results.comparison("flops-4M")
    return [
        Finding(
            "Dynamics, init or weak baseline? A weak baseline.",
            "From the plain init `fan_in` with AdamW, an `euler` coupling changes perplexity by "
            f"{_change(study, WEAK_EULER, WEAK_REFERENCE)}, its linear drift q + Δ·k alone by "
            f"{_pair(study, WEAK_DRIFT, WEAK_REFERENCE)}, a symmetric init by "
            f"{_pair(study, WEAK_SYMMETRIC, WEAK_REFERENCE)}, the init `modern` by "
            f"{_pair(study, ADAMW_MODERN, WEAK_REFERENCE)}, and `modern` with Muon by "
            f"{_pair(study, REFERENCE, WEAK_REFERENCE)}; on top of the last, `euler` changes it by "
            f"{_change(study, EULER)} ({describe_scale(study)}, {_seeds(study, EULER)}).",
        ),
        Finding(
            "On the best baseline differential attention and a coupling gain about one percent each; what "
            "differential attention gained before came from a weaker feed-forward.",
            f"With {_tokens(longest)} tokens, Muon and the init `modern`, `differential` changes perplexity "
            f"by {_change(longest, FIXED_DIFFERENTIAL)}, or {_change(flops, FIXED_DIFFERENTIAL)} after equal "
            "FLOPs, with a gated feed-forward, and by "
            f"{_pair(longest, PLAIN_DIFFERENTIAL, PLAIN_REFERENCE)} with a plain one of as many parameters, "
            f"which itself changes it by {_pair(longest, PLAIN_REFERENCE, REFERENCE)}; `euler` changes it by "
            f"{_change(longest, EULER)} and {_pair(longest, PLAIN_EULER, PLAIN_REFERENCE)} "
            f"({describe_scale(longest, tokens=False)}, {_seeds(longest, EULER)}).",
        ),
        Finding(
            "A faster query-key circuit sharpens attention on two of three tasks; too fast costs accuracy.",
            "With nothing but r changed, attention on the rationale (in agreement, on the subject): "
            f"{_paces(results, 'mass', PACE_SHARPENS)}; test performance: "
            f"{_paces(results, 'performance', PACE_COSTS)}.",
        ),
    ]


def _paces(results: Results, measure: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Return what ratios of the pace studies did to a measure: `SQuAD r = 10 0.14 → 0.15 (…)`."""
    texts = []
    for task, ratio in pairs:
        change = read_change(results.output(f"pace-{task}"), measure, ratio)
        texts.append(f"{TASK_NAMES[task]} r = {ratio} {change.before:.3g} → {change.effect}")
    return ", ".join(texts)


def _seeds(comparison: Comparison, name: str) -> str:
    return f"{len(find_arm(comparison, name).seeds)} seeds"


def _tokens(comparison: Comparison) -> str:
    return format_count(comparison.summary.config.tokens or 0)


def _change(comparison: Comparison, name: str, against: str | None = None) -> str:
    """Return the change of perplexity with its interval and verdict: `−1.2% (−2.0…−0.4; helps)`."""
    return _text(*judged_difference(comparison, name, against))


def _pair(comparison: Comparison, name: str, against: str) -> str:
    """Return the change between two arms, tested alone, in the form of `_change`."""
    return _text(*compare_arms(comparison, name, against))


def _text(difference: PairedDifference | BlockedDifference | None, verdict: Verdict) -> str:
    return f"{format_change(difference)[:-1]}; {verdict})"
