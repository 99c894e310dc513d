"""The ledger: every claim of the three papers, beside what this project measured.

A claim names its evidence: stored results under `docs/results`, as written by the commands of this project.
The text, the seeds and the status of a row all follow from them; no number is typed here except published
ones. Verdicts on differences are those of `qkflow.studies`, computed again from the stored runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from qkflow.errors import InputError, shorten
from qkflow.papers.costs import StudyCost
from qkflow.plain_data import read_json
from qkflow.report.document import format_count
from qkflow.report.tables import format_change
from qkflow.studies import Comparison, load_comparison
from qkflow.studies.blocked import BlockedDifference
from qkflow.studies.design import SeedDesign, TestResult, Verdict, decide
from qkflow.studies.results import ArmSummary
from qkflow.studies.stats import MIN_SEEDS_FOR_VERDICT, PairedDifference, holm

Key = TypeVar("Key", bound=Hashable)

_PACKAGED = Path(__file__).with_name("results")
_REPOSITORY = Path(__file__).parents[3] / "docs" / "results"


class Status(StrEnum):
    """What our measurements say about a claim, at our scale."""

    CONSISTENT = "consistent"
    CONTRADICTED = "contradicted"
    MIXED = "mixed"
    UNDECIDED = "undecided"
    NOT_TESTABLE = "not testable here"


@dataclass(frozen=True)
class Measurement:
    """One measurement.

    supports     the claim, its opposite (False), or neither (None)
    core_hours   what the runs of the command took, where they are stored
    """

    text: str
    scale: str
    seeds: int | None
    supports: bool | None
    command: str
    core_hours: float | None = None

    @property
    def mark(self) -> str:
        return {True: "✓", False: "✗", None: "?"}[self.supports]


class Evidence(Protocol):
    """Something stored that bears on a claim."""

    def read(self, results: Results) -> Measurement: ...


class Results:
    """The stored results, each file read once."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or (_PACKAGED if _PACKAGED.is_dir() else _REPOSITORY)
        self._comparisons: dict[str, Comparison] = {}

    def comparison(self, name: str) -> Comparison:
        if name not in self._comparisons:
            self._comparisons[name] = load_comparison(self._path(name))
        return self._comparisons[name]

    @property
    def is_own(self) -> bool:
        """Whether these are the results of this project, not of a folder that the user names."""
        return self.folder in (_PACKAGED, _REPOSITORY)

    def has(self, name: str) -> bool:
        return (self.folder / f"{name}.json").is_file()

    def output(self, name: str) -> Any:
        """Return the JSON that a command printed with --json."""
        return read_json(self._path(name))

    def _path(self, name: str) -> Path:
        path = self.folder / f"{name}.json"
        if not path.is_file():
            reason = ": its study has not been run yet" if self.is_own else ""
            raise InputError(f"the stored result {path} is missing{reason}", code="result-not-found")
        return path


@dataclass(frozen=True)
class Judged:
    """The verdict on one arm of a stored comparison, against its reference or against a control.

    expects   verdict that the claim predicts
    label     what is compared with what, in words
    """

    record: str
    arm: str
    expects: Verdict
    label: str
    against: str | None = None

    def read(self, results: Results) -> Measurement:
        comparison = results.comparison(self.record)
        difference, verdict = judged_difference(comparison, self.arm, self.against)
        return Measurement(
            text=f"{self.label}: {format_change(difference)}, {verdict}",
            scale=describe_scale(comparison),
            seeds=len(find_arm(comparison, self.arm).seeds),
            supports=_supports(verdict, self.expects),
            command=comparison.summary.command,
            core_hours=training_hours(comparison),
        )


@dataclass(frozen=True)
class Paired:
    """The difference of two arms of a stored comparison, tested alone at the level of the study."""

    record: str
    arm: str
    against: str
    expects: Verdict
    label: str

    def read(self, results: Results) -> Measurement:
        comparison = results.comparison(self.record)
        difference, verdict = compare_arms(comparison, self.arm, self.against)
        return Measurement(
            text=f"{self.label}: {format_change(difference)}, {verdict} (tested alone)",
            scale=describe_scale(comparison),
            seeds=difference.pairs if difference else 0,
            supports=_supports(verdict, self.expects),
            command=comparison.summary.command,
            core_hours=training_hours(comparison),
        )


@dataclass(frozen=True)
class Output:
    """A statement about the stored JSON output of a command.

    text, supports   functions of the output, as are the number of `seeds` behind it and its `core_hours`
    command          that repeats it; None: as stored in the output
    """

    name: str
    command: str | None
    scale: str
    text: Callable[[Any], str]
    supports: Callable[[Any], bool | None]
    seeds: Callable[[Any], int] | None = None
    core_hours: Callable[[Any], float] | None = None

    def read(self, results: Results) -> Measurement:
        output = results.output(self.name)
        return Measurement(
            text=self.text(output),
            scale=self.scale,
            seeds=self.seeds(output) if self.seeds else None,
            supports=self.supports(output),
            command=self.command or str(output["command"]),
            core_hours=self.core_hours(output) if self.core_hours else None,
        )


@dataclass(frozen=True)
class Measured:
    """A statement computed from the runs of a stored comparison, e.g. about stability.

    measure   returns the text, and whether it supports the claim
    """

    record: str
    measure: Callable[[Comparison], tuple[str, bool | None]]

    def read(self, results: Results) -> Measurement:
        comparison = results.comparison(self.record)
        text, supports = self.measure(comparison)
        seeds = comparison.summary.reference.seeds if comparison.summary.reference else ()
        command, hours = comparison.summary.command, training_hours(comparison)
        return Measurement(text, describe_scale(comparison), len(seeds), supports, command, hours)


@dataclass(frozen=True)
class Computed:
    """A statement that needs no training: it is computed each time."""

    command: str
    scale: str
    compute: Callable[[], tuple[str, bool]]

    def read(self, results: Results) -> Measurement:
        text, supports = self.compute()
        return Measurement(text, self.scale, None, supports, self.command)


@dataclass(frozen=True)
class Claim:
    """One claim of a paper.

    published   the figure its authors report
    to_settle   what would settle it, where our evidence cannot
    """

    id: str
    paper: str
    text: str
    published: str
    evidence: tuple[Evidence, ...] = ()
    to_settle: str | StudyCost = ""


@dataclass(frozen=True)
class LedgerRow:
    """A claim with what we found."""

    claim: Claim
    findings: tuple[Measurement, ...] = field(default=())

    @property
    def status(self) -> Status:
        votes = {finding.supports for finding in self.findings}
        if not votes:
            return Status.NOT_TESTABLE
        if len(votes) > 1:
            return Status.MIXED
        return {True: Status.CONSISTENT, False: Status.CONTRADICTED, None: Status.UNDECIDED}[votes.pop()]

    def to_dict(self) -> dict[str, Any]:
        claim = self.claim
        return {
            "id": claim.id,
            "paper": claim.paper,
            "claim": claim.text,
            "published": claim.published,
            "status": str(self.status),
            "findings": [
                {
                    "text": finding.text,
                    "scale": finding.scale,
                    "seeds": finding.seeds,
                    "supports": finding.supports,
                    "command": finding.command,
                    "core_hours": finding.core_hours,
                }
                for finding in self.findings
            ],
            "to_settle": str(claim.to_settle) or None,
        }


@contextmanager
def damaged_results(results: Results, name: str = "") -> Iterator[None]:
    """Raise InputError if results of the user's own folder do not have their layout."""
    try:
        yield
    except InputError:
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        if results.is_own:
            raise
        source = results.folder / f"{name}.json" if name else f"a file in {results.folder}"
        raise InputError(
            f"{source} is not what the command writes ({type(error).__name__}: {shorten(str(error))})",
            code="corrupt-result",
        ) from None


def find_row(rows: Sequence[Any], key: str, value: Any) -> Any:
    """Return the first row with this value of a key. Raise LookupError if there is none."""
    for row in rows:
        if row[key] == value:
            return row
    raise LookupError(f"no row with {key} = {value}")


def _read(item: Evidence, results: Results) -> Measurement:
    with damaged_results(results, getattr(item, "name", "") or getattr(item, "record", "")):
        return item.read(results)


def build_ledger(claims: Sequence[Claim], results: Results | None = None) -> list[LedgerRow]:
    """Return every claim with its findings, from the stored results. Arms without runs are left out."""
    results = results or Results()
    rows = []
    for claim in claims:
        findings = (_read(item, results) for item in claim.evidence)
        rows.append(LedgerRow(claim, tuple(finding for finding in findings if finding.seeds != 0)))
    return rows


def find_arm(comparison: Comparison, name: str) -> ArmSummary:
    """Return an arm by name. Raise if the comparison does not have it."""
    for arm in comparison.summary.arms:
        if arm.variant == name:
            return arm
    known = ", ".join(arm.variant for arm in comparison.summary.arms)
    raise InputError(f"{comparison.folder.name} has no arm '{name}', only {known}", code="unknown-arm")


def judged_difference(
    comparison: Comparison, name: str, against: str | None = None
) -> tuple[PairedDifference | BlockedDifference | None, Verdict]:
    """Return the difference of an arm to the reference, or to a control, and the verdict of the judge."""
    arm = find_arm(comparison, name)
    if against is None:
        return arm.difference, arm.verdict
    control = arm.against_controls.get(against)
    if control is None:
        raise InputError(
            f"{comparison.folder.name} does not compare '{name}' with '{against}'", code="unknown-arm"
        )
    return control, control.verdict


def compare_arms(comparison: Comparison, name: str, against: str) -> tuple[PairedDifference | None, Verdict]:
    """Return the paired difference of two arms and its verdict, without a correction for other arms.

    The difference is None if they share too few seeds for a verdict.
    """
    return judge_pairs(comparison, [(name, against)]).get((name, against), (None, Verdict.NO_VERDICT))


def judge_pairs(
    comparison: Comparison, pairs: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], tuple[PairedDifference, Verdict]]:
    """Return difference and verdict of pairs of arms, corrected together (Holm).

    A pair that shares too few seeds for a verdict is left out.
    """
    differences = {}
    for name, against in pairs:
        first, second = (find_arm(comparison, each).losses for each in (name, against))
        seeds = sorted(first.keys() & second.keys())
        if len(seeds) >= MIN_SEEDS_FOR_VERDICT:
            differences[name, against] = seed_design(comparison).difference(
                [first[seed] for seed in seeds], [second[seed] for seed in seeds]
            )
    return judge_differences(comparison, differences)


def judge_differences(
    comparison: Comparison, differences: Mapping[Key, PairedDifference]
) -> dict[Key, tuple[PairedDifference, Verdict]]:
    """Return every difference with its verdict, corrected together (Holm)."""
    p, direction, p_equivalent, mean = (
        np.array([getattr(each, field) for each in differences.values()], dtype=float)
        for field in ("p", "direction", "p_equivalent", "mean")
    )
    design = seed_design(comparison)
    verdicts = decide(TestResult(holm(p), direction, holm(p_equivalent)), mean, design)
    return {
        key: (difference, Verdict(str(verdict)))
        for (key, difference), verdict in zip(differences.items(), verdicts, strict=True)
    }


def seed_design(comparison: Comparison) -> SeedDesign:
    """Return the design of a stored comparison: its seeds are all there, so their number is fixed."""
    config = comparison.summary.config
    return SeedDesign.fixed(config.confidence, config.margin_nats)


def training_hours(comparison: Comparison) -> float:
    """Return the hours of all stored runs of a comparison together; each ran on one core."""
    return sum(float((run.result or {}).get("seconds") or 0.0) for run in comparison.runs) / 3600


def describe_scale(comparison: Comparison, *, tokens: bool = True) -> str:
    """Return corpus, model size and, unless the text has them, tokens of a comparison in a few words."""
    config = comparison.summary.config
    budget = f"{format_count(config.tokens)} tokens" if config.tokens else f"{config.minutes:g} min"
    return ", ".join([Path(config.data).name, config.preset, *([budget] if tokens else [])])


def _supports(verdict: Verdict, expects: Verdict) -> bool | None:
    if verdict in (Verdict.UNDECIDED, Verdict.NO_VERDICT, Verdict.REFERENCE):
        return None
    return verdict == expects
