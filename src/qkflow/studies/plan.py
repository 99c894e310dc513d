"""The plan of a comparison: the typed content of its `study.yaml`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeVar

from qkflow.config_io import check_mapping, dataclass_from_dict
from qkflow.errors import InputError
from qkflow.studies.config import ComparisonConfig
from qkflow.studies.runner.study_dir import STUDY_FILE, StudyDir

Role = Literal["reference", "variant", "control"]
T = TypeVar("T")
# Options of `ComparisonConfig` that a study.yaml of an earlier version does not have.
_ADDED_LATER = {name for name in ComparisonConfig.__dataclass_fields__ if name.startswith("finetune")}


@dataclass(frozen=True)
class PlannedCell:
    """One model with one init. `same_init_baseline` is the cell of the standard model with that init."""

    name: str
    init: str
    same_init_baseline: str


@dataclass(frozen=True)
class PlannedArm:
    """One variant and the cells it is trained in. `model` is its name without the init."""

    name: str
    role: Role
    model: str
    cells: tuple[PlannedCell, ...]


@dataclass(frozen=True)
class PlannedRun:
    """One training run. Its config is in its own folder."""

    id: str
    phase: str  # calibrate | tune | compare | finetune
    cell: str  # of a fine-tuning run: CELL/TASK
    seed: int
    lr: float
    tokens: int


@dataclass(frozen=True)
class StudyPlan:
    """What a comparison runs. The first arm is the standard model."""

    config: ComparisonConfig
    command: str
    arms: tuple[PlannedArm, ...]
    budgets: dict[str, int]  # tokens by model
    jobs: int
    runs: tuple[PlannedRun, ...]

    @classmethod
    def load(cls, study_dir: StudyDir) -> StudyPlan:
        """Read `study.yaml`; raise InputError (code `corrupt-study`) if it is not one of a comparison."""
        study = study_dir.load()
        try:
            values = {
                **{name: study.get(name) for name in ("command", "budgets", "jobs")},
                "config": _read(ComparisonConfig, study["config"], "config"),
                "arms": [_read_arm(arm) for arm in study["arms"]],
                "runs": [_read(PlannedRun, run, "runs") for run in study["runs"]],
            }
            return _read(cls, values, "study")
        except InputError as error:
            raise InputError(f"{study_dir.path / STUDY_FILE}: {error}", code="corrupt-study") from None

    def save(self, study_dir: StudyDir) -> None:
        arms = [{**asdict(arm), "cells": [asdict(cell) for cell in arm.cells]} for arm in self.arms]
        runs = [asdict(run) for run in self.runs]
        study_dir.save(
            {
                "config": self.config.to_dict(),
                "command": self.command,
                "arms": arms,
                "budgets": self.budgets,
                "jobs": self.jobs,
                "runs": runs,
            }
        )


def _read_arm(values: Any) -> PlannedArm:
    cells = check_mapping(values, "arms").get("cells")
    if isinstance(cells, list):
        values = {**values, "cells": [_read(PlannedCell, cell, "cells") for cell in cells]}
    return _read(PlannedArm, values, "arms")


def _read(cls: type[T], values: Any, key_path: str) -> T:
    """Build a dataclass from YAML values; every field must be present, unless it was added later."""
    required = {field.name for field in fields(cls)} - _ADDED_LATER  # type: ignore[arg-type]
    missing = sorted(required - check_mapping(values, key_path).keys())
    if missing:
        raise InputError(f"'{key_path}' has no key '{missing[0]}'", code="missing-key")
    return dataclass_from_dict(cls, values, key_path)
