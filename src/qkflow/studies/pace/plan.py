"""The plan of a pace study: the typed content of its `study.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkflow.config_io import dataclass_from_dict
from qkflow.errors import InputError
from qkflow.studies.pace.config import PaceStudyConfig
from qkflow.studies.pace.recipes import Recipe
from qkflow.studies.pace.results import StudyFacts
from qkflow.studies.plan import PlannedRun


@dataclass(frozen=True)
class PacePlan:
    """What a pace study runs. `arms` are its ratios."""

    config: PaceStudyConfig
    command: str
    arms: tuple[str, ...]
    recipe: Recipe
    facts: StudyFacts
    runs: tuple[PlannedRun, ...]

    @classmethod
    def from_dict(cls, study: Mapping[str, Any], source: Path) -> PacePlan:
        """Build a plan from the plain data of study.yaml; errors name `source` and the key."""
        sections: dict[str, Any] = dict(study)
        try:
            sections["config"] = PaceStudyConfig.from_dict(study["config"])
            sections["config"].check()
            sections["recipe"] = dataclass_from_dict(Recipe, study.get("recipe"), "recipe")
            sections["facts"] = dataclass_from_dict(StudyFacts, study.get("facts"), "facts")
            sections["runs"] = [dataclass_from_dict(PlannedRun, run, "runs") for run in study["runs"]]
            plan = dataclass_from_dict(cls, sections, "study")
            if not plan.arms:
                raise InputError("'arms' names no ratio", code="no-ratios")
            return plan
        except InputError as error:
            raise InputError(f"{source}: {error}", code="corrupt-study") from None
