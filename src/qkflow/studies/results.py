"""The results of a comparison, typed. `StudySummary.to_dict()` is the content of `summary.json`.

`analysis.analyze` builds a summary, `verdicts.judge` fills in its verdicts, and `qkflow.report` shows it.
Missing numbers are None, never NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from qkflow.studies.blocked import BlockedDifference
from qkflow.studies.config import ComparisonConfig
from qkflow.studies.design import Verdict
from qkflow.studies.plan import Metric, Role
from qkflow.studies.stats import PairedDifference, VarianceRatio, perplexity_percent_change

if TYPE_CHECKING:
    from qkflow.studies.finetune.results import TaskSummary


@dataclass(frozen=True)
class CorrectedDifference(PairedDifference):
    """A paired difference that was tested together with others; p-values after Holm's correction."""

    p_holm: float | None = field(kw_only=True)  # None for one pair
    p_equivalent_holm: float | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class ControlDifference(CorrectedDifference):
    """Difference of a variant to a control, with its own verdict and the control's against the reference.

    `p_noninferior`: one-sided test that the control is worse than the variant by less than the margin.
    """

    verdict: Verdict = field(kw_only=True)
    control_verdict: Verdict = field(kw_only=True)
    p_noninferior: float | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class NoiseFloor:
    """The A/A arm: the reference against itself with other inits and batch orders.

    `difference` is what seeds alone do to it. It is not zero in general, and it is not paired.
    """

    cell: str
    difference: PairedDifference


@dataclass(frozen=True)
class Power:
    """The smallest effect the study can show with 80% power, in percent of perplexity."""

    seeds: int
    n_comparisons: int
    detectable_sd: float  # in standard deviations of the paired differences
    sd: float | None  # of the paired differences, pooled over arms; None: not known yet
    source: str  # where `sd` comes from

    @property
    def detectable_percent(self) -> float | None:
        return None if self.sd is None else perplexity_percent_change(self.sd * self.detectable_sd)


@dataclass(frozen=True)
class AddedArm:
    """A variant that joined after the plan was fixed."""

    variant: str
    added_at: str
    runs_before: int  # finished runs of the study at that time


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
    in_race: bool = True  # trained on the judged seeds too, or clearly worse than the best init


@dataclass(frozen=True)
class ArmSummary:
    """One variant at its best init, compared with the reference.

    `by_init` is measured on the screening seeds, which chose the best init; all else on the judged seeds.
    """

    variant: str
    role: Role
    best_init: str
    cell: str
    seeds: tuple[int, ...] = ()
    lr: float | None = None
    loss: float | None = None
    loss_by_seed: tuple[float, ...] = ()  # with different tokenizers: logarithms of bits per byte
    failed_seeds: tuple[int, ...] = ()  # judged seeds whose run failed, e.g. diverged
    perplexity: float | None = None
    bits_per_byte: float | None = None
    cost: Cost = Cost()
    by_init: tuple[InitSummary, ...] = ()
    difference: PairedDifference | None = None
    seed_variance_ratio: VarianceRatio | None = None
    blocked: BlockedDifference | None = None
    seeds_to_decide: int | None = None  # of an undecided arm, in all; None: more than are reasonable
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

    @property
    def p_equivalent_holm(self) -> float | None:
        return self.difference.p_equivalent_holm if isinstance(self.difference, CorrectedDifference) else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; the keys of `cost` are at the top level."""
        values = {item.name: _to_plain(getattr(self, item.name)) for item in fields(self)}
        return values | values.pop("cost")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ArmSummary:
        plain = {item.name: values[item.name] for item in fields(cls) if item.name != "cost"}
        variance, blocked = values["seed_variance_ratio"], values["blocked"]
        return cls(
            **{
                **plain,
                "seeds": tuple(values["seeds"]),
                "loss_by_seed": tuple(values["loss_by_seed"]),
                "failed_seeds": tuple(values["failed_seeds"]),
                "cost": Cost(**{item.name: values[item.name] for item in fields(Cost)}),
                "by_init": tuple(_init_from_dict(init) for init in values["by_init"]),
                "difference": _difference_from_dict(values["difference"]),
                "seed_variance_ratio": None if variance is None else VarianceRatio(**variance),
                "blocked": None if blocked is None else BlockedDifference.from_dict(blocked),
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
        blocked = self.blocked.percent if self.blocked else {}
        numbers = ("low", "high", "bootstrap_low", "bootstrap_high", "p", "p_equivalent")
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
            "blocked_percent_low": blocked.get("low"),
            "blocked_percent_high": blocked.get("high"),
            "seeds_to_decide": self.seeds_to_decide,
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
    metric: Metric = "perplexity"
    noise_floor: NoiseFloor | None = None
    power: Power | None = None
    planned_at: str = ""
    added_arms: tuple[AddedArm, ...] = ()
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
        power = None if self.power is None else self.power.detectable_percent
        return {**values, "detectable_percent": power, "commit": self.commit}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StudySummary:
        from qkflow.studies.finetune.results import TaskSummary

        reference, runs = values["reference"], values["runs"]
        floor, power = values["noise_floor"], values["power"]
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
            metric=values["metric"],
            noise_floor=None
            if floor is None
            else NoiseFloor(floor["cell"], PairedDifference.from_dict(floor["difference"])),
            power=None if power is None else Power(**power),
            planned_at=values["planned_at"],
            added_arms=tuple(AddedArm(**arm) for arm in values["added_arms"]),
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
