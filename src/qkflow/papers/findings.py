"""The main findings of this project, one sentence each, with their numbers from stored results."""

from __future__ import annotations

from dataclasses import dataclass

from qkflow.papers.claims import Results, compare_arms, describe_scale, find_arm, judged_difference
from qkflow.papers.coupled_dynamics.claims import (
    AFFINE,
    AFFINE_DIFFERENTIAL,
    DIFFERENTIAL,
    EULER,
    MUON,
    REFERENCE,
    SOFTMAX_NORM,
    SYMMETRIC,
    WEAK_DRIFT,
    WEAK_EULER,
    WEAK_REFERENCE,
    WEAK_SYMMETRIC,
)
from qkflow.papers.faster_qk.claims import read_change
from qkflow.report.tables import format_change
from qkflow.studies import Comparison
from qkflow.studies.blocked import BlockedDifference
from qkflow.studies.design import Verdict
from qkflow.studies.stats import PairedDifference

SHARPER = ("mass", "confidence", "comprehensiveness", "performance")


@dataclass(frozen=True)
class MainFinding:
    title: str
    text: str


def main_findings(results: Results) -> list[MainFinding]:
    """Return the findings of the README, in order of importance."""
    study, slow = results.comparison("ingredients"), results.comparison("fast-slow")
    pace = results.output("pace-hatexplain")
    return [
        MainFinding(
            "Dynamics, init or weak baseline? A weak baseline.",
            "With AdamW and the plain init `fan_in`, an `euler` coupling changes perplexity by "
            f"{_change(study, WEAK_EULER, WEAK_REFERENCE)}, its linear drift q + Δ·k alone by "
            f"{_pair(study, WEAK_DRIFT, WEAK_REFERENCE)} and a free symmetric init by "
            f"{_pair(study, WEAK_SYMMETRIC, WEAK_REFERENCE)}; with Muon and the init `modern`, which change "
            f"it by {_pair(study, REFERENCE, WEAK_REFERENCE)} for free, `euler` changes it by "
            f"{_change(study, EULER)} ({describe_scale(study)}, {_seeds(study, EULER)}).",
        ),
        MainFinding(
            "On the best baseline differential attention pays; no coupling of softmax attention does.",
            f"There `differential` changes perplexity by {_change(study, DIFFERENTIAL)}, its norm without "
            f"its difference by {_change(study, SOFTMAX_NORM)}, the couplings `euler` by "
            f"{_change(study, EULER)} and `affine` by {_change(study, AFFINE)}, a symmetric init by "
            f"{_change(study, SYMMETRIC)} ({describe_scale(study)}, {_seeds(study, DIFFERENTIAL)}), a "
            f"slow path by {_change(slow, f'slow{MUON}@modern')} ({describe_scale(slow)}); `affine` on top "
            f"of `differential` adds {_pair(study, AFFINE_DIFFERENTIAL, DIFFERENTIAL)}, tested alone.",
        ),
        MainFinding(
            "A faster query-key circuit sharpens attention; too fast costs accuracy.",
            "On HateXplain, with r = 10 and nothing else changed: "
            + "; ".join(str(read_change(pace, name, "10")) for name in SHARPER)
            + f"; with r = 30, as published: {read_change(pace, 'performance', '30')}.",
        ),
    ]


def _seeds(comparison: Comparison, name: str) -> str:
    return f"{len(find_arm(comparison, name).seeds)} seeds"


def _change(comparison: Comparison, name: str, against: str | None = None) -> str:
    """Return the change of perplexity with its interval and verdict: `−1.2% (−2.0…−0.4; helps)`."""
    return _text(*judged_difference(comparison, name, against))


def _pair(comparison: Comparison, name: str, against: str) -> str:
    """Return the change between two arms, tested alone, in the form of `_change`."""
    return _text(*compare_arms(comparison, name, against))


def _text(difference: PairedDifference | BlockedDifference | None, verdict: Verdict) -> str:
    return f"{format_change(difference)[:-1]}; {verdict})"
