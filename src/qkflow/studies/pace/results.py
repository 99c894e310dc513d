"""Results of a pace study: what a run measures, and the summary over all runs.

`RunResult` is the result.json of one run, `PaceSummary` the summary.json of the study.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from qkflow.config_io import dataclass_from_dict
from qkflow.errors import InputError
from qkflow.plain_data import is_number
from qkflow.studies.pace.config import PaceStudyConfig
from qkflow.studies.pace.recipes import Recipe
from qkflow.studies.results import CorrectedDifference
from qkflow.studies.stats import PairedDifference

ATTRIBUTION_METHODS = ("attention", "rollout", "gradient", "random")  # compared by a study
Verdict = Literal["raises", "lowers", "no evidence", "no verdict"]
CurvePoint = tuple[float, float, float, float]  # step, then mean, minimum and maximum over seeds


@dataclass(frozen=True)
class RunResult:
    """Measurements of one finished run, all on test examples."""

    performance: float  # accuracy, or F1 of generated answers
    accuracy: float
    loss: float
    mass: float | None  # attention on the rationale; None without rationales
    confidence: float | None  # share of examples with mass above the threshold
    without_rationale: int
    measured: int
    faithfulness: Mapping[str, Mapping[str, Any]]  # attribution method → `Faithfulness.summary()`
    heatmap: list[list[float]] | None
    circuits: Mapping[str, float]  # `circuit_metrics`, mean over layers
    steps: int
    parameters: int
    seconds: float
    measure_seconds: float
    environment: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the content of result.json. The circuit metrics are top-level keys, as in other runs."""
        plain = asdict(self)
        return {"status": "finished", "error": None, **plain.pop("circuits"), **plain}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: Path | str = "result") -> RunResult:
        """Build a result from the content of result.json; errors name `source`, key and value."""
        names = {field.name for field in fields(cls)} - {"circuits"}
        circuits = {k: v for k, v in values.items() if k.startswith(("qk_", "ov_")) and is_number(v)}
        known = {name: values[name] for name in names & values.keys()}
        try:
            result = dataclass_from_dict(cls, {**known, "circuits": circuits}, "result")
            result._check()
        except InputError as error:
            raise InputError(
                f"{source}: {error}; remove the file to train the run again", code="corrupt-result"
            ) from None
        return result

    def _check(self) -> None:
        """Raise InputError unless every attribution method has its measures."""
        for method in ATTRIBUTION_METHODS:
            for name in ("comprehensiveness", "sufficiency"):
                measured = self.faithfulness.get(method, {})
                by_k = measured.get(name)
                if not is_number(measured.get(f"aopc_{name}")):
                    raise InputError(f"faithfulness.{method}.aopc_{name} is not a number", code="wrong-type")
                if not isinstance(by_k, dict) or not by_k or not all(map(is_number, by_k.values())):
                    raise InputError(f"faithfulness.{method}.{name} is not by k", code="wrong-type")
        if self.heatmap is not None and len({len(row) for row in self.heatmap}) > 1:
            raise InputError("heatmap has rows of different lengths", code="wrong-type")

    def aopc(self, name: str, method: str) -> float:
        """Return the comprehensiveness or sufficiency of an attribution method, mean over all k."""
        return float(self.faithfulness[method][f"aopc_{name}"])

    def at_smallest_k(self, name: str, method: str) -> float:
        """Return the comprehensiveness or sufficiency at the first k of the recipe."""
        return float(next(iter(self.faithfulness[method][name].values())))


@dataclass(frozen=True)
class MeasureSummary:
    """One measure at one ratio, over seeds. The baseline has no difference and no verdict."""

    mean: float
    by_seed: list[float]
    difference: CorrectedDifference | None = None  # to the baseline, paired by seed
    verdict: Verdict | None = None

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = {"mean": self.mean, "by_seed": self.by_seed}
        if self.difference is not None:
            plain |= {"difference": asdict(self.difference), "verdict": self.verdict}
        return plain


@dataclass(frozen=True)
class RatioSummary:
    """All measures at one ratio."""

    ratio: str
    seeds: list[int]
    measures: dict[str, MeasureSummary]
    heatmap: list[list[float]] | None
    deletions: dict[str, dict[str, float]]  # attribution method → measure → AOPC, mean over seeds
    seconds: float | None
    sentences: list[str]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "measures": {name: each.to_dict() for name, each in self.measures.items()}}


@dataclass(frozen=True)
class AttributionContrasts:
    """Paired differences in comprehensiveness between attribution methods, e.g. `attention_random`."""

    ratio: str
    differences: dict[str, PairedDifference]

    def to_dict(self) -> dict[str, Any]:
        names = ("mean", "low", "high", "p", "pairs")
        return {
            "ratio": self.ratio,
            **{key: {name: getattr(d, name) for name in names} for key, d in self.differences.items()},
        }


@dataclass(frozen=True)
class StudyFacts:
    """Size of the study and of its data."""

    steps: int
    train: int
    test: int
    majority: float | None  # test accuracy of the most frequent class; None for generated answers
    vocab_size: int
    notes: dict[str, int]  # counts of dropped, truncated or otherwise unusual examples


@dataclass(frozen=True)
class FailedRun:
    ratio: str
    seed: int
    error: str | None


@dataclass(frozen=True)
class RunCounts:
    planned: int
    finished: int
    failures: list[FailedRun]


@dataclass(frozen=True)
class PaceSummary:
    """Content of summary.json."""

    config: PaceStudyConfig
    command: str
    recipe: Recipe
    facts: StudyFacts
    baseline: str
    rows: list[RatioSummary]
    explains: list[AttributionContrasts]
    published: dict[str, tuple[float, float]] | None  # measure → (baseline, faster)
    runs: RunCounts
    curves: dict[str, dict[str, list[CurvePoint]]]  # ratio → metric → points
    environment: dict[str, Any]
    headline: str
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        return {
            "config": self.config.to_dict(),
            "command": self.command,
            "recipe": self.recipe.to_dict(),
            "facts": asdict(self.facts),
            "baseline": self.baseline,
            "rows": [row.to_dict() for row in self.rows],
            "explains": [each.to_dict() for each in self.explains],
            "published": self.published,
            "runs": asdict(self.runs),
            "curves": self.curves,
            "environment": self.environment,
            "headline": self.headline,
            "notes": self.notes,
        }


@dataclass(frozen=True)
class PaceStudyResult:
    """Summary of a study and the folder it is in."""

    folder: Path
    summary: PaceSummary

    @property
    def is_complete(self) -> bool:
        return self.summary.runs.finished == self.summary.runs.planned
