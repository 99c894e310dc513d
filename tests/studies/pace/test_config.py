"""Configuration of a pace study: recipes, checks, round trips."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, get_args

import pytest

from input_errors import raises_code
from qkflow.data.tasks import TASKS
from qkflow.studies.pace import PaceStudyConfig, run_pace_study
from qkflow.studies.pace.config import Task
from qkflow.studies.pace.recipes import PUBLISHED_RECIPES, RECIPES, Recipe


def test_every_task_has_a_recipe() -> None:
    assert set(get_args(Task)) == set(TASKS) == set(RECIPES)
    assert set(PUBLISHED_RECIPES) <= set(RECIPES)
    assert all("1" in recipe.ratios for recipe in (*RECIPES.values(), *PUBLISHED_RECIPES.values()))


def test_overrides_replace_recipe_values() -> None:
    recipe = PaceStudyConfig("agreement", dim=16, epochs=2.0, ratios=("1",)).resolve_recipe()
    assert (recipe.dim, recipe.hidden_dim, recipe.epochs, recipe.ratios) == (16, 64, 2.0, ("1",))
    assert recipe.n_heads == RECIPES["agreement"].n_heads


def test_config_and_recipe_round_trip() -> None:
    config = PaceStudyConfig("squad", "data/squad", ratios=("1", "increasing:40"), lr=1e-3)
    assert PaceStudyConfig.from_dict(config.to_dict()) == config
    recipe = config.resolve_recipe()
    assert Recipe.from_dict(recipe.to_dict()) == recipe


def test_command_contains_changed_options() -> None:
    config = PaceStudyConfig("squad", "my data", as_published=True, ratios=("1", "3"), batch_size=8)
    expected = "squad --data 'my data' --as-published --ratios 1,3 --batch-size 8 --out a"
    assert config.to_command(Path("a")) == f"qkflow pace study {expected}"
    assert shlex.split(config.to_command(Path("a b")))[-1] == "a b"


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"seeds": 0}, "below-minimum"),
        ({"batch_size": 0}, "below-minimum"),
        ({"lr": -1.0}, "below-minimum"),
        ({"epochs": float("nan")}, "not-finite"),
        ({"confidence": 0.4}, "below-minimum"),
        ({"confidence": 1.0}, "above-maximum"),
        ({"steps": 5, "epochs": 2.0}, "steps-and-epochs"),
        ({"ratios": ()}, "no-ratios"),
        ({"ratios": ("1", "0")}, "invalid-ratio"),
        ({"ratios": ("1", "-3")}, "invalid-ratio"),
        ({"ratios": ("fast",)}, "invalid-ratio"),
        ({"ratios": ("increasing:40:steps=100",), "steps": 10}, "ratio-ramp-too-long"),
        ({"optimizer": "adam"}, "unknown-optimizer"),
        ({"task": "hatexplain"}, "missing-data"),
        ({"task": "hateexplain"}, "unknown-task"),
        ({"task": "cola", "as_published": True, "data": "x"}, "unknown-published-task"),
        ({"data": "nowhere.tsv"}, "path-not-found"),
    ],
)
def test_bad_config_raises_and_writes_nothing(options: dict[str, Any], code: str, tmp_path: Path) -> None:
    with raises_code(code):
        run_pace_study(PaceStudyConfig(**{"task": "agreement", **options}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unknown_task_is_corrected() -> None:
    with raises_code("unknown-task") as raised:
        PaceStudyConfig("hateexplain").check()  # type: ignore[arg-type]
    assert "'hatexplain'" in str(raised.value)
