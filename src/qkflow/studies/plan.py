"""The plan of a comparison: the typed content of its `study.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from qkflow.config_io import Range, Seed, check_mapping, check_ranges, dataclass_from_dict
from qkflow.errors import InputError, shorten
from qkflow.studies.config import ComparisonConfig
from qkflow.studies.runner.study_dir import STUDY_FILE, StudyDir
from qkflow.training.config import DEFAULT_LR

Role = Literal["reference", "variant", "control"]
Metric = Literal["perplexity", "bits per byte"]
T = TypeVar("T")


@dataclass(frozen=True)
class PlannedCell:
    """One model with one init.

    `variant` is the name of its variant without the init. `same_init_baseline` is the cell of the pool of
    baselines that differs from it in the variant alone; empty if there is none.
    """

    name: str
    variant: str
    init: str
    same_init_baseline: str


@dataclass(frozen=True)
class PlannedArm:
    """One variant and the cells it is trained in; the first arm has those of all baselines.

    `runs_before` is the number of runs of the study that had finished when the arm was added.
    """

    name: str
    role: Role
    cells: tuple[PlannedCell, ...]
    added_at: str = ""  # ISO time, UTC
    runs_before: int = 0


@dataclass(frozen=True)
class PlannedRun:
    """One training run. Its config is in its own folder."""

    id: str
    phase: str  # cost | tune | screen | compare | noise | finetune
    cell: str  # of a fine-tuning run: CELL/TASK
    seed: Seed
    lr: float
    tokens: Annotated[int, Range(0, 10**16)]

    def __post_init__(self) -> None:
        check_ranges(self, "runs")


@dataclass(frozen=True)
class StudyPlan:
    """What a comparison runs. The first arm is the pool of baselines, whose best cell is the reference."""

    config: ComparisonConfig
    command: str
    arms: tuple[PlannedArm, ...]
    budgets: dict[str, int]  # tokens by model
    jobs: Annotated[int, Range(0, 10**6)]
    runs: tuple[PlannedRun, ...]
    created_at: str = ""  # ISO time, UTC

    @classmethod
    def load(cls, study_dir: StudyDir) -> StudyPlan:
        """Read `study.yaml`; raise InputError (code `corrupt-study`) if it is not one of a comparison."""
        return cls.from_dict(study_dir.load(), study_dir.path / STUDY_FILE)

    @classmethod
    def from_dict(cls, study: Mapping[str, Any], source: Path) -> StudyPlan:
        """Build a plan from the plain data of `to_dict`; errors name `source`."""
        study = _with_absent_keys(study)
        try:
            values = {
                **{name: study.get(name) for name in ("command", "budgets", "jobs", "created_at")},
                "config": _read(ComparisonConfig, study.get("config"), "config"),
                "arms": [_read_arm(arm) for arm in _read_list(study, "arms")],
                "runs": [_read(PlannedRun, run, "runs") for run in _read_list(study, "runs")],
            }
            plan: StudyPlan = _read(cls, values, "study")
            plan.check()
            return plan
        except InputError as error:
            raise InputError(f"{source}: {error}", code="corrupt-study") from None

    def check(self) -> None:
        """Raise InputError unless the config is valid and the arms have cells, those of the pool first."""
        self.config.check()
        check_ranges(self, "study")
        if not self.arms or self.arms[0].role != "reference":
            raise InputError("the first of its arms must have the role reference", code="missing-reference")
        for arm in self.arms:
            if not arm.cells:
                raise InputError(f"the arm '{arm.name}' has no cells", code="missing-cells")

    @property
    def metric(self) -> Metric:
        """What is judged: losses per token cannot be compared between tokenizers."""
        own_tokenizer = any("data.tokenizer=" in cell.variant for arm in self.arms for cell in arm.cells)
        return "bits per byte" if own_tokenizer else "perplexity"

    def to_dict(self) -> dict[str, Any]:
        arms = [{**asdict(arm), "cells": [asdict(cell) for cell in arm.cells]} for arm in self.arms]
        return {
            "created_at": self.created_at,
            "config": self.config.to_dict(),
            "command": self.command,
            "arms": arms,
            "budgets": self.budgets,
            "jobs": self.jobs,
            "runs": [asdict(run) for run in self.runs],
        }

    def save(self, study_dir: StudyDir) -> None:
        study_dir.save(self.to_dict())


def _with_absent_keys(study: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add what earlier versions did not store: one microbatch, and AdamW unless a variant set another."""
    config = study.get("config")
    if not isinstance(config, dict):
        return study
    config = {"accumulate": 1, **config}
    if "optimizer" in config:
        return {**study, "config": config}
    lr = None if config.get("lr") == DEFAULT_LR["adamw"] else config.get("lr")
    config = {**config, "optimizer": "adamw", "lr": lr}
    return {**study, "config": config, "command": f"{study.get('command')} --optimizer adamw"}


def _read_list(study: Mapping[str, Any], key: str) -> list[Any]:
    values = study.get(key)
    if not isinstance(values, list):
        raise InputError(f"'{key}' must be a list, not {shorten(values)}", code="wrong-type")
    return values


def _read_arm(values: Any) -> PlannedArm:
    cells = check_mapping(values, "arms").get("cells")
    if isinstance(cells, list):
        values = {**values, "cells": [_read(PlannedCell, cell, "cells") for cell in cells]}
    return _read(PlannedArm, values, "arms")


def _read(cls: type[T], values: Any, key_path: str) -> T:
    """Build a dataclass from YAML values; every field must be present."""
    missing = sorted({field.name for field in fields(cls)} - check_mapping(values, key_path).keys())  # type: ignore[arg-type]
    if missing:
        raise InputError(
            f"'{key_path}' has no key '{missing[0]}': was it written by another version of qkflow? "
            "Use another --out",
            code="missing-key",
        )
    return dataclass_from_dict(cls, values, key_path)
