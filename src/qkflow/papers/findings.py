"""The main findings of this project, one sentence each, with their numbers from stored results."""

from __future__ import annotations

from dataclasses import dataclass

from qkflow.papers.claims import Results, compare_arms, describe_scale, find_arm, judged_difference
from qkflow.papers.coupled_dynamics.claims import (
    AFFINE,
    DIFFERENTIAL,
    EULER,
    MUON,
    REFERENCE,
    UNCOUPLED,
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
            f"{_change(study, WEAK_EULER, WEAK_REFERENCE)}; with Muon and the init `modern`, which change "
            f"it by {_pair(study, REFERENCE, WEAK_REFERENCE)} for free, by {_change(study, EULER)} "
            f"({describe_scale(study)}, {_seeds(study, WEAK_EULER)}); a slow path changes that baseline by "
            f"{_change(slow, f'slow{MUON}@modern')} ({describe_scale(slow)}).",
        ),
        MainFinding(
            "The gain on the weak baseline is the linear drift, and a free init does more.",
            f"There q + Δ·k alone changes {_pair(study, WEAK_DRIFT, WEAK_REFERENCE)}, the network of `euler` "
            f"adds {_pair(study, WEAK_EULER, WEAK_DRIFT)}, uncoupled networks change "
            f"{_pair(study, UNCOUPLED, WEAK_REFERENCE)}, and a symmetric init changes "
            f"{_pair(study, WEAK_SYMMETRIC, WEAK_REFERENCE)}.",
        ),
        MainFinding(
            "On the best baseline differential attention pays; couplings of softmax attention do not.",
            f"There `differential` changes {_change(study, DIFFERENTIAL)} ({_seeds(study, DIFFERENTIAL)}), "
            f"the couplings `euler` {_change(study, EULER)} ({_seeds(study, EULER)}) and `affine` "
            f"{_change(study, AFFINE)} ({_seeds(study, AFFINE)}).",
        ),
        MainFinding(
            "A faster query-key circuit sharpens attention; too fast costs accuracy.",
            "On HateXplain, with r = 10 and nothing else changed: "
            + "; ".join(str(read_change(pace, name, "10")) for name in SHARPER)
            + f". With r = 30, as published: {read_change(pace, 'performance', '30')}.",
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
