"""Whole comparisons with real worker processes (of a toy problem)."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from qkflow.errors import InputError
from qkflow.studies import Comparison, compare, rebuild_report
from qkflow.studies.compare import TrainingCost, affordable_steps, parse_comparison_config
from qkflow.studies.grid import (
    CALIBRATION_SEEDS,
    CALIBRATION_STEPS,
    TUNING_SEED,
    ComparisonConfig,
    build_grid,
)
from qkflow.studies.runner.study_dir import StudyDir
from toy_study import TOY


def starts(folder: Path) -> dict[str, int]:
    """How often a worker was started, run by run."""
    return {
        run.name: len((run / "starts.txt").read_text().splitlines()) for run in (folder / "runs").iterdir()
    }


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("studies") / "whole"
    return compare("toy text", variants="standard,euler,broken@gpt2", out=folder, **TOY)


def test_says_what_helps_and_what_failed_and_finishes_the_rest(answer: Comparison) -> None:
    rows = {row["variant"]: row for row in answer.rows}
    assert rows["standard"]["verdict"] == "reference"
    assert rows["euler"]["verdict"] == "helps"
    assert rows["euler"]["high"] < 0
    assert 0 < rows["euler"]["tokens_to_target"] < 1
    assert rows["euler"]["seeds"] == 3
    assert rows["broken@gpt2"]["verdict"] == "no verdict"
    assert answer.verdicts["euler"].startswith("euler helps: its perplexity is")
    failed = answer.summary["runs"]["failed"]
    assert [(run["cell"], run["seed"]) for run in failed] == [("broken@gpt2", seed) for seed in range(3)]
    assert failed[0]["error"] == "RuntimeError: the toy exploded on <b>purpose</b>"
    assert not answer.complete


def test_the_reference_is_the_best_started_standard_model(answer: Comparison) -> None:
    reference = answer.summary["reference"]
    losses = {start["init"]: start["loss"] for start in reference["by_init"]}
    assert set(losses) == {"gpt2", "fan_in"}
    assert losses[reference["best_init"]] == min(losses.values()) == reference["loss"]


def test_leaves_every_output(answer: Comparison) -> None:
    summary = json.loads((answer.folder / "summary.json").read_text())
    assert summary == json.loads(json.dumps(answer.summary))
    assert summary["environment"] == {"commit": "0000000", "threads": "1"}
    with open(answer.folder / "summary.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["variant"] for row in table] == ["standard", "euler", "broken@gpt2"]
    assert float(table[1]["low"]) == pytest.approx(summary["variants"][0]["difference"]["low"])
    with open(answer.folder / "curves.csv", newline="") as file:
        assert len({row["run"] for row in csv.DictReader(file)}) == 12
    frame = answer.to_dataframe()
    assert frame.set_index("variant").loc["euler", "percent_high"] < 0
    study = yaml.safe_load((answer.folder / "study.yaml").read_text())
    assert study["command"].startswith(
        "qkflow compare --data 'toy text' --variants standard,euler,broken@gpt2"
    )


def test_asked_again_only_failures_are_tried_again_and_more_may_be_asked(answer: Comparison) -> None:
    before = starts(answer.folder)
    more = compare("toy text", variants="standard,euler,broken@gpt2,drift@gpt2", out=answer.folder, **TOY)
    after = starts(answer.folder)
    assert all(after[run] == 1 for run in before if not run.startswith("broken"))
    assert all(after[run] == 2 for run in before if run.startswith("broken"))
    assert {run.split(".")[0] for run in after.keys() - before.keys()} == {"drift-gpt2"}
    assert more.summary["variants"][0]["loss_by_seed"] == answer.summary["variants"][0]["loss_by_seed"]
    assert {row["variant"] for row in more.rows} == {"standard", "euler", "broken@gpt2", "drift@gpt2"}
    assert rebuild_report(answer.folder).summary == more.summary


def test_another_question_is_not_written_over_the_first(answer: Comparison) -> None:
    with pytest.raises(InputError, match="holds a comparison with preset tiny, not small"):
        compare("toy text", variants="euler", preset="small", out=answer.folder, **TOY)


def test_learning_rates_are_tuned_on_a_seed_apart(tmp_path: Path) -> None:
    ask = {"variants": "euler@gpt2", "inits": "gpt2", "seeds": 1, "verdict": False, **TOY}
    found = compare("toy", out=tmp_path / "s", tune_lr=True, lr_factors="0.01,1", **ask)
    tried = {row["cell"]: row for row in found.summary["learning_rates"]}
    assert set(tried) == {"standard@gpt2", "euler@gpt2"}
    for row in tried.values():
        assert [one["lr"] for one in row["tried"]] == pytest.approx([0.003, 0.3])
        assert row["chosen"] == 0.3
        assert row["at_edge"]
    seeds = {(run.phase, run.seed) for run in found.runs}
    assert seeds == {("tune", TUNING_SEED), ("compare", 0)}
    kept = {run.phase for run in found.runs if (found.folder / "runs" / run.id / "model").exists()}
    assert kept == {"compare"}  # weights that only served to choose a rate are let go of
    assert {row["lr"] for row in found.rows} == {0.3}


def test_equal_flops_give_the_dearer_model_fewer_tokens(tmp_path: Path) -> None:
    ask = {"variants": "euler", "inits": "gpt2", "seeds": 1, "verdict": False, "match": "flops", **TOY}
    found = compare("toy", out=tmp_path / "s", **ask)
    tokens = {row["variant"]: row["tokens"] for row in found.rows}
    assert tokens == {"standard": 640, "euler": 512}  # the toy counts 1.25 times the FLOPs for euler
    assert found.rows[0]["flops"] == found.rows[1]["flops"]
    count = sum(starts(tmp_path / "s").values())
    compare("toy", out=tmp_path / "s", **ask)
    assert sum(starts(tmp_path / "s").values()) == count


def test_minutes_become_tokens(tmp_path: Path) -> None:
    """Measured costs are planted as finished runs, so that nothing depends on this machine's speed."""
    ask = {"variants": "euler", "inits": "gpt2", "seeds": 1, "verdict": False, "minutes": 0.2}
    settings = (
        {k: v for k, v in TOY.items() if k in ComparisonConfig.__dataclass_fields__} | ask | {"tokens": None}
    )
    grid, folder = (
        build_grid(parse_comparison_config("toy", settings), TOY["parts"]),
        StudyDir(tmp_path / "s"),
    )
    tokens = dict.fromkeys(("standard", "euler"), CALIBRATION_STEPS * 32)
    for run in grid.build_runs("calibrate", CALIBRATION_SEEDS, tokens_by_model=tokens):
        result = {"status": "finished", "step_seconds": 0.5, "flops_per_token": 1.0}
        folder.run_dir(run.id).write_config(run.config)
        (folder.run_dir(run.id).path / "result.json").write_text(json.dumps(result))
    folder.save({"config": grid.config.to_dict(), "arms": [], "budgets": {}, "runs": []})
    found = compare("toy", out=tmp_path / "s", **{**TOY, **ask, "tokens": None}, jobs=2)
    assert {row["variant"]: row["tokens"] for row in found.rows} == {"standard": 24 * 32, "euler": 24 * 32}
    assert folder.load()["budgets"] == {"standard": 768, "euler": 768}


def test_minutes_are_shared_out_over_runs_and_jobs() -> None:
    cost = TrainingCost(step_seconds=0.1, flops_per_token=1.0, overhead_seconds=2.0)
    # 10 runs, 4 at a time, are 3 rounds of 20 s, 2 s of which go around the steps.
    assert affordable_steps(1.0, n_runs=10, jobs=4, cost=cost) == 180
    with pytest.raises(InputError, match=r"too short for 10 runs, 1 at a time; give at least 0\.67"):
        affordable_steps(0.5, n_runs=10, jobs=1, cost=cost)


def test_a_corpus_that_cannot_be_prepared_leaves_nothing_behind(tmp_path: Path) -> None:
    def prepare(question: object) -> dict[str, Any]:
        raise InputError("unknown corpus")

    with pytest.raises(InputError, match="unknown corpus"):
        compare("toy", variants="euler", out=tmp_path / "s", **{**TOY, "prepare": prepare})
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({"seeds": 1}, "a verdict needs at least 3 seeds"),
        ({"variants": "eulr"}, "did you mean 'euler'"),
        ({"engine": "locl"}, "did you mean 'local'"),
        ({"jobs": 0}, "--jobs"),
        ({"tokens": "lots"}, "write e.g. 200k"),
        ({"lr_factors": "x"}, "--lr-factors must be numbers"),
    ],
)
def test_bad_input_leaves_nothing_behind(change: dict[str, Any], hint: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=hint):
        compare("toy", **{"variants": "euler", **TOY, **change}, out=tmp_path / "s")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("variant", "hint"), [("leapfrog:n=0", "variant 'leapfrog:n=0': "), ("slow:P=0", "variant 'slow:P=0': ")]
)
def test_what_cannot_be_built_leaves_nothing_behind(variant: str, hint: str, tmp_path: Path) -> None:
    asked = {key: value for key, value in TOY.items() if key != "parts"}
    with pytest.raises(InputError, match=hint):
        compare("toy", variants=f"standard,{variant}", out=tmp_path / "s", **asked)
    assert not (tmp_path / "s").exists()


def _without(key: str, part: str | None = None) -> Any:
    def harm(study: dict[str, Any]) -> dict[str, Any]:
        inner = study if part is None else study[part] if part == "question" else study[part][0]
        del inner[key]
        return study

    return harm


@pytest.mark.parametrize(
    ("harm", "hint"),
    [
        (_without("confidence", "question"), "'question' does not say 'confidence'"),
        (_without("cells", "arms"), "'arms' does not say 'cells'"),
        (_without("seed", "runs"), "'runs' does not say 'seed'"),
        (lambda study: {**study, "config": 5}, "is not what `qkflow compare` writes"),
        (lambda study: {**study, "runs": [5]}, "runs' must be a mapping"),
        (lambda study: {**study, "config": {**study["config"], "confidence": "x"}}, "must be a number"),
    ],
)
def test_a_damaged_study_is_one_sentence(answer: Comparison, harm: Any, hint: str, tmp_path: Path) -> None:
    study = harm(yaml.safe_load((answer.folder / "study.yaml").read_text()))
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    with pytest.raises(InputError, match=hint):
        rebuild_report(tmp_path)


def test_a_study_that_is_no_text_or_has_lost_its_budgets(answer: Comparison, tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_bytes(b"question: \xff\xfe")
    with pytest.raises(InputError, match=r"study\.yaml is not a text file"):
        rebuild_report(tmp_path)
    study = _without("budgets")(yaml.safe_load((answer.folder / "study.yaml").read_text()))
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    with pytest.raises(InputError, match="budgets' must be a mapping"):
        compare("toy text", variants="standard,euler,broken@gpt2", out=tmp_path, **TOY)


def test_what_a_worker_calls_bad_input_stops_the_comparison(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="picky@gpt2: option 'm' of coupling 'picky' is unknown"):
        compare("toy", variants="picky", inits="gpt2", out=tmp_path / "s", jobs=1, **TOY)


def test_a_folder_of_something_else_or_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="holds something else"):
        compare("toy", variants="euler", out=tmp_path, **TOY)
    with pytest.raises(InputError, match="is a file"):
        compare("toy", variants="euler", out=tmp_path / "notes.txt", **TOY)
    with (
        StudyDir(tmp_path / "s").lock(),
        pytest.raises(InputError, match="another comparison is at work"),
    ):
        compare("toy", variants="euler", out=tmp_path / "s", **TOY)
    with pytest.raises(InputError, match="is not a comparison"):
        rebuild_report(tmp_path)


def test_the_corpus_is_prepared_once_and_its_fingerprint_is_part_of_every_run(tmp_path: Path) -> None:
    asked: list[str] = []

    def prepare(question: Any) -> dict[str, str]:
        asked.append(question.data)
        return {"fingerprint": "abc"}

    ask = {"variants": "euler", "inits": "gpt2", "seeds": 1, "verdict": False, **TOY}
    found = compare("toy", out=tmp_path / "s", **{**ask, "prepare": prepare})
    assert asked == ["toy"]
    for run in found.runs:
        config = yaml.safe_load((found.folder / "runs" / run.id / "config.yaml").read_text())
        assert config["data"]["fingerprint"] == "abc"
