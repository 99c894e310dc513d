"""The scores of fine-tuned models and their verdicts, typed. Part of `StudySummary`.

Scores and differences are in points: 100 × accuracy, F1 or Matthews correlation. Higher is better.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from qkflow.studies.design import Verdict
from qkflow.studies.plan import Role
from qkflow.studies.results import FailedRun, RunCounts


@dataclass(frozen=True)
class ScoreDifference:
    """Mean of the paired differences to the reference in points; positive if the variant is better."""

    mean: float
    low: float | None  # t-interval; None for one pair
    high: float | None
    p: float | None  # None where the spread over seeds is unknown
    p_holm: float | None
    pairs: int


@dataclass(frozen=True)
class TaskArm:
    """One variant on one task, at the cell that language modeling chose."""

    variant: str
    role: Role = "variant"
    cell: str = ""
    seeds: tuple[int, ...] = ()
    score_by_seed: tuple[float, ...] = ()
    score: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)  # means over seeds of all metrics of the task
    difference: ScoreDifference | None = None
    verdict: Verdict = Verdict.NO_VERDICT

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TaskArm:
        difference = values["difference"]
        return cls(
            **{
                **values,
                "seeds": tuple(values["seeds"]),
                "score_by_seed": tuple(values["score_by_seed"]),
                "difference": None if difference is None else ScoreDifference(**difference),
                "verdict": Verdict(values["verdict"]),
            }
        )


@dataclass(frozen=True)
class TaskSummary:
    """One task of a comparison; the first arm is the reference."""

    task: str  # glue:CoLA
    metric: str  # of the scores that are judged
    majority: float | None  # score of always predicting the most frequent training class
    train_examples: int | None
    validation_examples: int | None
    arms: tuple[TaskArm, ...]
    runs: RunCounts
    sentence: str = ""

    @property
    def is_complete(self) -> bool:
        return self.runs.finished == self.runs.planned

    @property
    def other_metrics(self) -> list[str]:
        """The metrics beside the one that is judged."""
        return list(dict.fromkeys(name for arm in self.arms for name in arm.metrics if name != self.metric))

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one flat row per arm, for finetune.csv."""
        numbers = [item.name for item in fields(ScoreDifference)]
        return [
            {
                "task": self.task,
                "metric": self.metric,
                "variant": arm.variant,
                "role": arm.role,
                "verdict": str(arm.verdict),
                "cell": arm.cell,
                "seeds": len(arm.seeds),
                "score": arm.score,
                "majority": self.majority,
                "f1": arm.metrics.get("f1"),
                **{
                    "difference" if name == "mean" else name: getattr(arm.difference, name, None)
                    for name in numbers
                },
                "score_by_seed": " ".join(f"{value:.6g}" for value in arm.score_by_seed),
            }
            for arm in self.arms
        ]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TaskSummary:
        runs = values["runs"]
        return cls(
            **{
                **values,
                "arms": tuple(TaskArm.from_dict(arm) for arm in values["arms"]),
                "runs": RunCounts(**{**runs, "failed": tuple(FailedRun(**run) for run in runs["failed"])}),
            }
        )
