"""Every recipe is read, planned, rehearsed and run for two steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from input_errors import raises_code
from qkflow.cli.main import dispatch
from qkflow.data import TrainWindows
from qkflow.models import Decoder
from qkflow.models.presets import PRESETS, Preset
from qkflow.papers.claims import Results
from qkflow.papers.costs import StudyCost
from qkflow.papers.faster_qk.synthetic import EPOCH_STEPS, FIGURE_CONFIGS, train_synthetic
from qkflow.papers.ledger import CLAIMS_BY_DIAL
from qkflow.papers.open_questions import OPEN_QUESTION, open_question_rows
from qkflow.papers.planning import TaskPlan, plan_recipe
from qkflow.papers.recipe import RECIPE_DIR, Recipe, load_recipe, read_recipe, recipe_names
from qkflow.papers.rehearsal import checkpoint_layout, rehearse_recipe
from qkflow.studies.config import ComparisonConfig
from qkflow.studies.grid import build_grid
from qkflow.studies.hardware.config import HardwareConfig
from qkflow.studies.pace import PaceStudyConfig
from qkflow.studies.pace.config import PaceRunConfig
from qkflow.studies.pace.dataset import DataLimits, prepare_task_data, save_task_data
from qkflow.studies.pace.run import train_and_measure
from qkflow.studies.pace.study import plan_runs
from qkflow.studies.workload import TrainedModel, trained_models
from qkflow.training.distributed import DistContext
from qkflow.training.step import Stepper
from toy_task import write_hatexplain, write_squad

SHRUNKEN = {"preset": "tiny", "tokenizer": "bytes", "seq_len": 32, "batch_size": 2, "tokens": 640}
PUBLISHED = {
    *("coupling", "coupling-60m", "coupling-150m", "coupling-350m", "affine-differential-455m"),
    *("integrators", "step-counts", "uncoupled", "compute-matched", "pubmed", "web-text", "glue"),
    *("differential", "affine-differential-150m", "fast-slow", "synthetic-grid", "fixed-attention"),
    *(f"{task}{kind}" for task in ("squad", "agreement", "hatexplain") for kind in ("", "-single-knob")),
}
COMPARISONS = [name for name in recipe_names() if load_recipe(name).kind == "comparison"]
TASKS = [name for name in recipe_names() if name not in COMPARISONS]


@pytest.fixture
def one_layer_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "tiny", Preset(1, 32, 4, "gelu", 64, "shrunken"))


def test_every_published_experiment_has_a_recipe() -> None:
    recipes = {name: load_recipe(name) for name in recipe_names()}
    published = {name for name, recipe in recipes.items() if not recipe.claim.startswith(OPEN_QUESTION)}
    assert published == PUBLISHED
    for name in published:
        assert recipes[name].published, name
        assert "arXiv" in recipes[name].paper, name
    assert all(recipe.assumed for recipe in recipes.values())


def test_open_questions_have_a_recipe_and_a_cost() -> None:
    rows = open_question_rows(Results())
    assert {row["recipe"] for row in rows} == set(recipe_names()) - PUBLISHED
    for row in rows:
        assert row["question"].endswith("?")
        assert f"qkflow reproduce {row['recipe']} --scale paper" in row["what would settle it"]
        assert "hours of one" in row["what would settle it"]


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparison_is_planned_and_runs_two_steps(name: str, one_layer_presets: None) -> None:
    recipe = load_recipe(name)
    for stage in recipe.stage_names[:1]:  # later stages have the same models
        config = recipe.config("paper", stage, **SHRUNKEN)
        assert isinstance(config, ComparisonConfig)
        for model in trained_models(build_grid(config)):
            assert _losses_of_two_steps(model)
    planned = plan_recipe(recipe, "paper", HardwareConfig("a100", usd_per_hour=2.0), **SHRUNKEN)
    assert set(planned.stages) == set(recipe.stage_names)
    for stage in planned.stages.values():
        assert not isinstance(stage, TaskPlan)
        assert stage.device_hours > 0
        assert stage.usd == pytest.approx(2 * stage.device_hours)
        assert all(model.fits for model in stage.models)


def _losses_of_two_steps(model: TrainedModel) -> list[float]:
    tokens = np.arange(2_000, dtype=np.uint16) % model.config.vocab_size
    windows = TrainWindows(tokens, model.seq_len, model.train.batch_size, seed=0)
    context = DistContext(torch.device("cpu"))
    stepper = Stepper(Decoder(model.config, seed=0), model.train, windows, context, total_steps=2)
    losses = [float(stepper.step(step, 1e-3, step / 2)[0]) for step in range(2)]
    assert np.isfinite(losses).all()
    return losses


@pytest.mark.parametrize("name", TASKS)
def test_task_is_planned(name: str) -> None:
    recipe = load_recipe(name)
    hours = []
    for scale in ("paper", "tiny"):
        (stage,) = plan_recipe(recipe, scale, HardwareConfig()).stages.values()
        assert isinstance(stage, TaskPlan)
        assert stage.runs >= len(stage.arms)
        hours.append(stage.device_hours)
    assert hours[0] > hours[1] > 0


@pytest.mark.parametrize("name", [name for name in TASKS if load_recipe(name).kind == "pace"])
def test_pace_study_trains_two_steps(name: str, tmp_path: Path) -> None:
    small = {"dim": 16, "n_layers": 1, "n_heads": 2, "steps": 2, "epochs": None, "measured": 2, "seeds": 1}
    task = load_recipe(name).config("tiny", **small)
    assert isinstance(task, PaceStudyConfig)
    config = replace(task, data=_write_task(task.task, tmp_path))
    recipe = config.resolve_recipe()
    limits = DataLimits(config.as_published, 40, 8)
    data = prepare_task_data(config.task, config.source, recipe, limits)
    run = plan_runs(config, recipe, save_task_data(data, tmp_path), data.mean_length, 2)[-1]
    folder = tmp_path / "runs" / run.id
    folder.mkdir(parents=True)
    result = train_and_measure(folder, PaceRunConfig.from_dict(json.loads(json.dumps(run.config))))
    assert result.steps == 2
    assert json.loads((folder / "result.json").read_text())["status"] == "finished"


def _write_task(task: str, folder: Path) -> str | None:
    if task == "squad":
        return str(write_squad(folder))
    if task == "hatexplain":
        train, test = (
            [
                {
                    "text": f"{word} text number {n}",
                    "label": ("normal", "offensive")[n % 2],
                    "rationale_token_spans": [[0, 1]] if n % 2 else [],
                }
                for n in range(20)
            ]
            for word in ("some", "other")
        )
        return str(write_hatexplain(folder, train, test))
    return None


def test_controlled_task_trains() -> None:
    configs = [replace(each, steps=2) for each in FIGURE_CONFIGS[:1]]
    (result,) = train_synthetic(configs, [0])
    assert result.steps == 2 <= EPOCH_STEPS


@pytest.mark.parametrize("name", COMPARISONS)
def test_paper_scale_is_rehearsed_on_meta(name: str) -> None:
    recipe, stage = load_recipe(name), load_recipe(name).stage_names[0]
    config = recipe.config("paper", stage)
    assert isinstance(config, ComparisonConfig)
    model = trained_models(build_grid(config))[-1]
    ranks = (0, 7) if name == "fast-slow" else (7,)
    layouts = [checkpoint_layout(model, rank, 8) for rank in ranks]
    parameters = dict(Decoder(model.config, device="meta").named_parameters())
    for layout in layouts:
        assert {f"model.{each}" for each in parameters} <= layout.tensors.keys()
        assert layout.n_bytes == pytest.approx(layout.total_bytes / 8, rel=0.02)
        for key, parameter in parameters.items():
            rows = -(-parameter.shape[0] // 8)
            held = min(rows, max(0, parameter.shape[0] - layout.rank * rows))
            assert layout.tensors[f"model.{key}"] == (held, *parameter.shape[1:])


def test_unknown_key_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = yaml.safe_load((RECIPE_DIR / "coupling-60m.yaml").read_text("utf-8"))

    def refused(code: str, **changes: Any) -> str:
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump({**values, **changes}))
        with raises_code(code) as error:
            dispatch(["reproduce", str(path), "--plan"])
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "'claims'" in refused("unknown-key", claims=["x"])
    assert "toknes" in refused("unknown-setting", settings={"variants": "euler", "toknes": 1})
    assert "papr" in refused("unknown-scale", scales={**values["scales"], "papr": {}})
    assert "'tiny'" in refused("missing-scale", scales={"paper": values["scales"]["paper"]})
    refused("unknown-kind", kind="comparsion")
    refused("not-a-mapping", stages={"main": 3})
    refused("invalid-token-multiplier", stages={"main": {"token_multiplier": [2]}})
    assert not capsys.readouterr().out


def test_recipes_that_are_not_files(tmp_path: Path) -> None:
    with raises_code("unknown-recipe"):
        load_recipe("fastslow")
    with raises_code("recipe-not-found"):
        load_recipe(str(tmp_path / "none.yaml"))
    broken = tmp_path / "broken.yaml"
    broken.write_text("kind: [")
    with raises_code("invalid-yaml"):
        read_recipe(broken)
    with raises_code("unknown-scale"):
        dispatch(["reproduce", "coupling", "--scale", "huge"])
    with raises_code("nothing-to-rehearse"):
        rehearse_recipe(load_recipe("squad"), "paper", HardwareConfig())


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["coupling", "--world-size", "8"], "option-of-plan"),
        (["squad", "--parallel", "fsdp"], "option-of-plan"),
        (["squad", "--engine", "ray"], "option-of-comparison"),
        (["synthetic-grid", "--processes-per-run", "2"], "option-of-comparison"),
    ],
)
def test_options_that_a_run_would_ignore(
    options: list[str], code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with raises_code(code):
        dispatch(["reproduce", *options])
    assert not list(tmp_path.iterdir())


def test_claims_name_their_recipes() -> None:
    named = {
        recipe
        for claims in CLAIMS_BY_DIAL.values()
        for claim in claims
        if isinstance(claim.to_settle, StudyCost)
        for recipe in claim.to_settle.recipes
    }
    assert {"coupling-60m", "affine-differential-455m", "fast-slow", "synthetic-grid"} <= named
    assert named <= set(recipe_names())
    text = str(StudyCost("affine-differential-455m"))
    assert "--scale paper" in text
    assert "18 runs" in text
    assert "hours of one A100" in text


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["reproduce", "--json"]) == 0
    assert {row["name"] for row in json.loads(capsys.readouterr().out)["recipes"]} == set(recipe_names())


def test_shown_recipe_can_be_edited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["reproduce", "coupling-60m", "--show"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "mine.yaml").write_text(text.replace("preset: 60m", "preset: small"))
    mine, packaged = load_recipe(str(tmp_path / "mine.yaml")), load_recipe("coupling-60m")
    assert mine.stage_settings("paper") == {**packaged.stage_settings("paper"), "preset": "small"}
    folder = Path(__file__).parents[2] / "recipes"  # a link, so that they are found in a clone
    assert sorted(path.stem for path in folder.glob("*.yaml")) == recipe_names()


def test_stage_replaces_scale_replaces_settings() -> None:
    recipe = load_recipe("fast-slow")
    short, long = (recipe.stage_settings("tiny", stage, tokens="1k") for stage in ("short", "long"))
    assert (short["tokens"], long["tokens"]) == ("1k", 10_000)
    assert "token_multiplier" not in long
    assert isinstance(recipe, Recipe)
