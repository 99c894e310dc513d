"""The results of a comparison, typed. `StudySummary.to_dict()` is the content of `summary.json`.

`analysis.analyze` builds a summary, `verdicts.judge` fills in its verdicts, and `qkflow.report` shows it.
Missing numbers are None, never NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from qkflow.studies.config import ComparisonConfig
from qkflow.studies.plan import Role
from qkflow.studies.stats import PairedDifference, VarianceRatio

if TYPE_CHECKING:
    from qkflow.studies.finetune.results import TaskSummary


class Verdict(StrEnum):
    """The outcome for one arm; `verdicts.judge` decides it."""

    HELPS = "helps"
    HURTS = "hurts"
    NO_EVIDENCE = "no evidence"
    NO_VERDICT = "no verdict"
    REFERENCE = "reference"


@dataclass(frozen=True)
class CorrectedDifference(PairedDifference):
    """A paired difference that was tested together with others."""

    p_holm: float | None  # p after Holm's correction; None for one pair


@dataclass(frozen=True)
class ControlDifference(CorrectedDifference):
    """Difference of a variant to a control, with its own verdict and the control's against the reference."""

    verdict: Verdict
    control_verdict: Verdict


@dataclass(frozen=True)
class ChoiceOfInit:
    """Leave-one-out check of the choice of inits: for each seed, both inits are chosen on the other seeds.

    These differences are not independent (any two share all but one of the seeds that chose), so there is
    no p-value and no interval.
    """

    stable: bool  # the same inits were chosen for every seed
    mean: float
    percent: float | None  # of perplexity


@dataclass(frozen=True)
class Cost:
    """Cost of an arm: means over the runs of its best init, and ratios to the reference."""

    tokens: float | None = None
    flops: float | None = None
    seconds: float | None = None
    step_seconds: float | None = None
    peak_memory_bytes: int | None = None
    parameters: int | None = None
    tokens_to_target: float | None = None  # to the reference's final loss; None if it was not reached
    seconds_to_target: float | None = None
    step_time_ratio: float | None = None


@dataclass(frozen=True)
class InitSummary:
    """One arm with one init. `against` is the cell of the standard model with the same init."""

    init: str
    cell: str
    against: str
    seeds: tuple[int, ...]
    lr: float | None
    loss: float | None
    perplexity: float | None
    same_init_difference: PairedDifference | None


@dataclass(frozen=True)
class ArmSummary:
    """One variant at its best init, compared with the reference."""

    variant: str
    role: Role
    best_init: str
    cell: str
    seeds: tuple[int, ...] = ()
    lr: float | None = None
    loss: float | None = None
    loss_by_seed: tuple[float, ...] = ()
    perplexity: float | None = None
    bits_per_byte: float | None = None
    cost: Cost = Cost()
    by_init: tuple[InitSummary, ...] = ()
    difference: PairedDifference | None = None
    seed_variance_ratio: VarianceRatio | None = None
    choice_of_init: ChoiceOfInit | None = None
    verdict: Verdict = Verdict.NO_VERDICT
    against_controls: Mapping[str, ControlDifference] = field(default_factory=dict)
    sentence: str = ""

    @property
    def losses(self) -> dict[int, float]:
        """Final validation loss by seed."""
        return dict(zip(self.seeds, self.loss_by_seed, strict=True))

    @property
    def p_holm(self) -> float | None:
        return self.difference.p_holm if isinstance(self.difference, CorrectedDifference) else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; the keys of `cost` are at the top level."""
        values = {item.name: _to_plain(getattr(self, item.name)) for item in fields(self)}
        return values | values.pop("cost")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ArmSummary:
        plain = {item.name: values[item.name] for item in fields(cls) if item.name != "cost"}
        variance, choice = values["seed_variance_ratio"], values["choice_of_init"]
        return cls(
            **{
                **plain,
                "seeds": tuple(values["seeds"]),
                "loss_by_seed": tuple(values["loss_by_seed"]),
                "cost": Cost(**{item.name: values[item.name] for item in fields(Cost)}),
                "by_init": tuple(_init_from_dict(init) for init in values["by_init"]),
                "difference": _difference_from_dict(values["difference"]),
                "seed_variance_ratio": None if variance is None else VarianceRatio(**variance),
                "choice_of_init": None if choice is None else ChoiceOfInit(**choice),
                "verdict": Verdict(values["verdict"]),
                "against_controls": {
                    name: _control_from_dict(item) for name, item in values["against_controls"].items()
                },
            }
        )

    def to_row(self) -> dict[str, Any]:
        """Return one flat row, for data frames and summary.csv."""
        difference, variance = self.difference, self.seed_variance_ratio
        percent = difference.percent if difference else {}
        numbers = ("low", "high", "bootstrap_low", "bootstrap_high", "p")
        return {
            "variant": self.variant,
            "role": self.role,
            "verdict": str(self.verdict),
            "best_init": self.best_init,
            "lr": self.lr,
            "seeds": len(self.seeds),
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "difference": difference.mean if difference else None,
            **{name: getattr(difference, name, None) for name in numbers},
            "p_holm": self.p_holm,
            "percent": percent.get("mean"),
            "percent_low": percent.get("low"),
            "percent_high": percent.get("high"),
            "seed_variance_ratio": variance.ratio if variance else None,
            **{name: getattr(self.cost, name) for name in _COST_COLUMNS},
            "sentence": self.sentence,
        }


# the order of the columns in summary.csv
_COST_COLUMNS = (
    "tokens_to_target",
    "seconds_to_target",
    "step_time_ratio",
    "tokens",
    "flops",
    "seconds",
    "step_seconds",
    "peak_memory_bytes",
    "parameters",
)


@dataclass(frozen=True)
class FailedRun:
    id: str
    cell: str
    seed: int
    error: str


@dataclass(frozen=True)
class RunCounts:
    planned: int
    finished: int
    failed: tuple[FailedRun, ...] = ()


@dataclass(frozen=True)
class LrTrial:
    lr: float
    loss: float | None  # None if the run diverged


@dataclass(frozen=True)
class LrSearch:
    """The learning-rate search of one cell. `at_edge`: the best rate is the smallest or largest tried."""

    cell: str
    chosen: float | None
    at_edge: bool
    tried: tuple[LrTrial, ...]


@dataclass(frozen=True)
class StudySummary:
    """A whole comparison. `reference` is None until a run of the standard model has finished."""

    config: ComparisonConfig
    command: str
    reference: ArmSummary | None
    variants: tuple[ArmSummary, ...]
    runs: RunCounts
    learning_rates: tuple[LrSearch, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)  # where runs differ, a list of values
    notes: tuple[str, ...] = ()
    headline: str = ""
    finetune: tuple[TaskSummary, ...] = ()

    @property
    def arms(self) -> list[ArmSummary]:
        """The reference, if there is one, then every variant."""
        return [*([self.reference] if self.reference else []), *self.variants]

    @property
    def commit(self) -> str | list[str] | None:
        return self.environment.get("commit")

    @property
    def is_complete(self) -> bool:
        return self.runs.finished == self.runs.planned and all(task.is_complete for task in self.finetune)

    def to_dict(self) -> dict[str, Any]:
        values = {item.name: _to_plain(getattr(self, item.name)) for item in fields(self)}
        return {**values, "commit": self.commit}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StudySummary:
        from qkflow.studies.finetune.results import TaskSummary

        reference, runs = values["reference"], values["runs"]
        searches = [
            LrSearch(**{**search, "tried": tuple(LrTrial(**trial) for trial in search["tried"])})
            for search in values["learning_rates"]
        ]
        return cls(
            config=ComparisonConfig.from_dict(values["config"]),
            command=values["command"],
            reference=None if reference is None else ArmSummary.from_dict(reference),
            variants=tuple(ArmSummary.from_dict(arm) for arm in values["variants"]),
            runs=RunCounts(**{**runs, "failed": tuple(FailedRun(**run) for run in runs["failed"])}),
            learning_rates=tuple(searches),
            environment=values["environment"],
            notes=tuple(values["notes"]),
            headline=values["headline"],
            finetune=tuple(TaskSummary.from_dict(task) for task in values.get("finetune", ())),
        )


def _to_plain(value: Any) -> Any:
    """Return dataclasses as dicts, tuples as lists and enums as strings."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, tuple | list):
        return [_to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _to_plain(item) for name, item in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return {item.name: _to_plain(getattr(value, item.name)) for item in fields(value)}
    return str(value) if isinstance(value, StrEnum) else value


def _difference_from_dict(values: Mapping[str, Any] | None) -> PairedDifference | None:
    if values is None:
        return None
    return (CorrectedDifference if "p_holm" in values else PairedDifference).from_dict(values)


def _control_from_dict(values: Mapping[str, Any]) -> ControlDifference:
    verdicts = {name: Verdict(values[name]) for name in ("verdict", "control_verdict")}
    return ControlDifference.from_dict({**values, **verdicts})


def _init_from_dict(values: Mapping[str, Any]) -> InitSummary:
    difference = _difference_from_dict(values["same_init_difference"])
    return InitSummary(**{**values, "seeds": tuple(values["seeds"]), "same_init_difference": difference})
