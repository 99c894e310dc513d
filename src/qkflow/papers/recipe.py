"""Recipes: every published experiment as a YAML file, at the scale of its paper and at `tiny`.

    kind: comparison            # comparison, pace, synthetic or fixed-attention
    paper: …                    # citation
    claim: …                    # what its authors report
    published: {…}              # their figures
    assumed: […]                # what is not public and was chosen here
    settings: {…}               # fields of the config of this kind, for both scales
    scales: {paper: {…}, tiny: {…}}
    stages: {short: {…}, long: {…, token_multiplier: 10}}   # comparisons only; default: one, `main`

A setting of a stage replaces that of a scale, which replaces that of all scales.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from qkflow.config_io import Count, Seed, check_mapping, check_ranges, dataclass_from_dict, parse_count
from qkflow.errors import InputError, shorten, unknown
from qkflow.plain_data import is_number, read_yaml
from qkflow.studies.config import DEFAULT_TOKENS, ComparisonConfig
from qkflow.studies.pace import PaceStudyConfig

RECIPE_DIR = Path(__file__).with_name("recipes")
Kind = Literal["comparison", "pace", "synthetic", "fixed-attention"]
Scale = Literal["paper", "tiny"]
SCALES: tuple[Scale, ...] = get_args(Scale)
FindingsName = Literal["gate", "longer-training"]


@dataclass(frozen=True)
class ControlledTaskConfig:
    """Runs on the controlled task: the settings of the published figure, or attention fixed at α."""

    seeds: Count = 3
    first_seed: Seed = 1234
    steps: Count | None = None  # at most, of every setting (default: as published)

    def __post_init__(self) -> None:
        check_ranges(self, "config")


@dataclass(frozen=True)
class TaskSize:
    """Size of the training set of a task, for a plan before the data is read."""

    examples: int
    seq_len: int  # mean tokens per example


@dataclass(frozen=True)
class Recipe:
    """One published experiment."""

    name: str
    kind: Kind
    paper: str
    claim: str
    scales: dict[str, Any]
    published: dict[str, Any] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    stages: dict[str, Any] = field(default_factory=dict)
    findings: FindingsName | None = None
    task_size: dict[str, Any] | None = None

    @property
    def stage_names(self) -> tuple[str, ...]:
        return tuple(self.stages) or ("main",)

    def stage_settings(self, scale: str, stage: str = "main", **overrides: Any) -> dict[str, Any]:
        """Return the settings of a stage; `overrides` replace those of the recipe, tokens of the first stage.

        Raise InputError for an unknown scale or stage.
        """
        if scale not in SCALES:
            raise unknown("scale", scale, SCALES)
        if stage not in self.stage_names:
            raise unknown(f"stage of {self.name}", stage, self.stage_names)
        values = {**self.settings, **self.scales[scale], **overrides}
        values |= {
            key: value for key, value in self.stages.get(stage, {}).items() if key != "token_multiplier"
        }
        multiplier = self.stages.get(stage, {}).get("token_multiplier", 1)
        if not is_number(multiplier) or multiplier <= 0:
            raise InputError(
                f"stage {stage}: token_multiplier must be a positive number, not {shorten(multiplier)}",
                code="invalid-token-multiplier",
            )
        if multiplier != 1:
            values["tokens"] = round(multiplier * parse_count(values.get("tokens", DEFAULT_TOKENS)))
        return values

    def config(
        self, scale: str, stage: str = "main", **overrides: Any
    ) -> ComparisonConfig | PaceStudyConfig | ControlledTaskConfig:
        """Return the typed config of a stage. Raise InputError for a key or value that it does not have."""
        values = self.stage_settings(scale, stage, **overrides)
        key_path = f"recipe {self.name}, scale {scale}"
        if self.kind == "comparison":
            try:
                config = ComparisonConfig.parse(**values)
            except InputError as error:
                raise InputError(f"{key_path}: {error}", code=error.code) from None
            config.check()
            return config
        if self.kind == "pace":
            study = dataclass_from_dict(PaceStudyConfig, values, key_path)
            study.check()
            return study
        return dataclass_from_dict(ControlledTaskConfig, values, key_path)

    def size_of_task(self) -> TaskSize:
        return dataclass_from_dict(TaskSize, self.task_size or {}, f"recipe {self.name}, task_size")

    def check(self) -> None:
        """Read every stage at every scale. Raise InputError for the first error."""
        for scale in self.scales:
            if scale not in SCALES:
                raise unknown(f"scale of recipe {self.name}", scale, SCALES)
        for scale in SCALES:
            if scale not in self.scales:
                raise InputError(f"recipe {self.name} has no scale '{scale}'", code="missing-scale")
            for stage in self.stage_names:
                self.config(scale, stage)


def recipe_names() -> list[str]:
    """Return the names of all recipes of this version."""
    return sorted(path.stem for path in RECIPE_DIR.glob("*.yaml"))


def recipe_path(name: str) -> Path:
    """Return the file of a recipe; `name` may itself be the path of a YAML file."""
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    if name not in recipe_names():
        raise unknown("recipe", name, recipe_names())
    return RECIPE_DIR / f"{name}.yaml"


def load_recipe(name: str) -> Recipe:
    """Return a recipe by name, or of a path to a YAML file."""
    path = recipe_path(name)
    return _packaged_recipe(path.stem) if path.parent == RECIPE_DIR else read_recipe(path)


@cache
def _packaged_recipe(name: str) -> Recipe:
    return read_recipe(RECIPE_DIR / f"{name}.yaml")


def read_recipe(path: Path) -> Recipe:
    """Read a recipe. Raise InputError, in one sentence, for anything that is not one."""
    try:
        values = read_yaml(path, text_code="recipe-not-text")
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"the recipe {path} does not exist", code="recipe-not-found") from None
    try:
        recipe = dataclass_from_dict(Recipe, {"name": path.stem, **check_mapping(values, "recipe")}, "recipe")
        for section in (*recipe.scales.values(), *recipe.stages.values()):
            check_mapping(section, "recipe.scales or recipe.stages")
        recipe.check()
    except InputError as error:
        raise InputError(f"{path.name}: {error}", code=error.code) from None
    return recipe
