"""The main findings of this project, one sentence each, with their numbers from stored results."""

from __future__ import annotations

from dataclasses import dataclass

from qkflow.papers.claims import Results, describe_scale, judged_difference
from qkflow.papers.coupled_dynamics.claims import (
    ADAMW_MODERN,
    EULER,
    MUON,
    WEAK_EULER,
    WEAK_REFERENCE,
    WEAK_SYMMETRIC,
)
from qkflow.report.tables import format_change
from qkflow.studies import Comparison


@dataclass(frozen=True)
class MainFinding:
    title: str
    text: str


def main_findings(results: Results) -> list[MainFinding]:
    """Return the findings of the README, in order of importance."""
    study, slow = results.comparison("ingredients"), results.comparison("fast-slow")
    seeds = len(study.summary.reference.seeds) if study.summary.reference else 0
    return [
        MainFinding(
            "Dynamics, init or weak baseline? A weak baseline.",
            "With AdamW and the plain init `fan_in`, an `euler` coupling changes perplexity by "
            f"{_change(study, WEAK_EULER, WEAK_REFERENCE)} and a free symmetric init by "
            f"{_change(study, WEAK_SYMMETRIC, WEAK_REFERENCE)}. Both stay behind standard attention with "
            f"Muon and the init `modern`, by {_change(study, WEAK_EULER)} and "
            f"{_change(study, WEAK_SYMMETRIC)}. Added to that baseline, `euler` changes "
            f"{_change(study, EULER)} ({describe_scale(study)}, {seeds} seeds).",
        ),
        MainFinding(
            "The optimizer does more than any dial.",
            "AdamW instead of Muon changes the perplexity of standard attention from `modern` by "
            f"{_change(study, ADAMW_MODERN)}.",
        ),
        MainFinding(
            "A slow path shows no gain for language modeling at this size.",
            f"It changes perplexity by {_change(slow, f'slow{MUON}@modern')} ({describe_scale(slow)}).",
        ),
    ]


def _change(comparison: Comparison, name: str, against: str | None = None) -> str:
    """Return the change of perplexity with its interval and verdict: `−1.2% (−2.0…−0.4; helps)`."""
    difference, verdict = judged_difference(comparison, name, against)
    return f"{format_change(difference)[:-1]}; {verdict})"
