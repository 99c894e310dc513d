"""The main findings of this project, one sentence each, with their numbers from stored results."""

from __future__ import annotations

from dataclasses import dataclass

from qkflow.papers.claims import Results, compare_arms, describe_scale
from qkflow.report.tables import format_difference
from qkflow.studies import Comparison

FAN_IN = "{train.lr=0.006}@fan_in"
MUON = "{train.lr=0.012,train.optimizer=muon}"


@dataclass(frozen=True)
class MainFinding:
    title: str
    text: str


def main_findings(results: Results) -> list[MainFinding]:
    """Return the findings of the README, in order of importance."""
    study, slow = results.comparison("ingredients"), results.comparison("fast-slow")
    reference = f"standard{MUON}"
    seeds = len(study.summary.reference.seeds) if study.summary.reference else 0
    return [
        MainFinding(
            "Dynamics, init or weak baseline? A weak baseline.",
            f"Trained with AdamW from `fan_in`, a plain init, an `euler` coupling changes perplexity by "
            f"{_change(study, f'euler{FAN_IN}', f'standard{FAN_IN}')}. A standard model trained with Muon "
            f"from the init `modern` changes it by {_change(study, reference, f'standard{FAN_IN}')}, and "
            f"there the coupling adds {_change(study, f'euler{MUON}@modern', reference)} "
            f"({describe_scale(study)}, {seeds} seeds).",
        ),
        MainFinding(
            "The optimizer does more than any dial.",
            f"Muon instead of AdamW changes the perplexity of standard attention from `modern` by "
            f"{_change(study, reference, 'standard{train.lr=0.0015}@modern')}. With Muon the init matters "
            f"little: `modern` against `gpt2` {_change(study, reference, f'standard{MUON}@gpt2')}.",
        ),
        MainFinding(
            "Pace and timescale do not pay for language modeling at this size.",
            f"A query-key circuit that learns 4 times faster changes perplexity by "
            f"{_change(study, f'standard+pace=4{MUON}@modern', reference)}, a slow path by "
            f"{_change(slow, f'slow{MUON}@modern', reference)} ({describe_scale(slow)}).",
        ),
    ]


def _change(comparison: Comparison, name: str, against: str) -> str:
    """Return the change of perplexity with its interval and verdict, e.g. `−1.2% (−2.0…−0.4), helps`."""
    difference, verdict = compare_arms(comparison, name, against)
    mean, interval = format_difference(difference)
    return f"{mean} ({interval}; {verdict})"
