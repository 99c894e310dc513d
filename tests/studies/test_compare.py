"""Whole comparisons with real worker processes (of a toy problem)."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from input_errors import raises_code
from qkflow.errors import InputError
from qkflow.report import write_outputs
from qkflow.studies import Comparison, ComparisonConfig, StudySummary, compare, load_comparison
from qkflow.studies.budgets import TrainingCost, affordable_steps
from qkflow.studies.grid import (
    COST_SEEDS,
    COST_STEPS,
    NOISE_FLOOR_SEED,
    TUNING_SEED,
    build_grid,
)
from qkflow.studies.plan import StudyPlan
from qkflow.studies.runner.study_dir import StudyDir
from toy_study import SMALL_GRID, TOY

Study = dict[str, Any]


def count_starts(folder: Path) -> dict[str, int]:
    """Return how often the worker of each run was started."""
    return {
        run.name: len((run / "starts.txt").read_text().splitlines()) for run in (folder / "runs").iterdir()
    }


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("studies") / "whole"
    return compare("toy text", variants="standard,euler,broken@gpt2", out=folder, **SMALL_GRID, **TOY)


def test_verdicts_and_failed_runs(comparison: Comparison) -> None:
    rows = {row["variant"]: row for row in comparison.rows}
    assert rows["standard"]["verdict"] == "reference"
    assert rows["euler"]["verdict"] == "helps"
    assert rows["euler"]["high"] < 0
    assert 0 < rows["euler"]["tokens_to_target"] < 1
    assert rows["euler"]["seeds"] == 3
    assert rows["broken@gpt2"]["verdict"] == "no verdict"
    assert comparison.verdicts["euler"].startswith("euler helps: its perplexity is")
    failed = comparison.summary.runs.failed
    assert [(run.cell, run.seed) for run in failed] == [("broken@gpt2", seed) for seed in range(3)]
    assert failed[0].error == "RuntimeError: the toy exploded on <b>purpose</b>"
    assert not comparison.is_complete


def test_reference_is_the_best_init_of_the_standard_model(comparison: Comparison) -> None:
    reference = comparison.summary.reference
    assert reference is not None
    losses = {init.init: init.loss for init in reference.by_init}
    assert set(losses) == {"gpt2", "fan_in"}
    assert losses[reference.best_init] == min(filter(None, losses.values()))
    assert {init.init for init in reference.by_init if init.in_race} == {"gpt2"}
    screened = [run for run in comparison.runs if run.cell == reference.cell and run.phase == "screen"]
    assert losses[reference.best_init] == pytest.approx(sum(run.loss for run in screened) / 2)
    assert reference.seeds == (0, 1, 2)  # fresh seeds judge


def test_write_outputs(comparison: Comparison) -> None:
    write_outputs(comparison)
    summary = json.loads((comparison.folder / "summary.json").read_text())
    assert summary == comparison.summary.to_dict()
    assert StudySummary.from_dict(summary) == comparison.summary
    assert summary["environment"] == {"commit": "0000000", "threads": "1"}
    with open(comparison.folder / "summary.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["variant"] for row in table] == ["standard", "euler", "broken@gpt2"]
    assert float(table[1]["low"]) == pytest.approx(summary["variants"][0]["difference"]["low"])
    with open(comparison.folder / "curves.csv", newline="") as file:
        assert len({row["run"] for row in csv.DictReader(file)}) == 6
    frame = comparison.to_dataframe()
    assert frame.set_index("variant").loc["euler", "percent_high"] < 0
    study = yaml.safe_load((comparison.folder / "study.yaml").read_text())
    assert study["command"].startswith(
        "qkflow compare --data 'toy text' --variants standard,euler,broken@gpt2"
    )


def test_repeated_call_runs_only_failed_and_new_runs(comparison: Comparison) -> None:
    before = count_starts(comparison.folder)
    variants = "standard,euler,broken@gpt2,drift@gpt2"
    more = compare("toy text", variants=variants, out=comparison.folder, **SMALL_GRID, **TOY)
    after = count_starts(comparison.folder)
    assert all(after[run] == 1 for run in before if not run.startswith("broken"))
    assert all(after[run] == 2 for run in before if run.startswith("broken"))
    assert {run.split(".")[0] for run in after.keys() - before.keys()} == {"drift-gpt2"}
    assert more.summary.variants[0].loss_by_seed == comparison.summary.variants[0].loss_by_seed
    assert {row["variant"] for row in more.rows} == {"standard", "euler", "broken@gpt2", "drift@gpt2"}
    assert load_comparison(comparison.folder).summary == more.summary


def test_folder_of_another_comparison_is_rejected(comparison: Comparison) -> None:
    with raises_code("other-study"):
        compare("toy text", variants="euler", preset="small", out=comparison.folder, **SMALL_GRID, **TOY)


def test_processes_that_cannot_share_a_batch(tmp_path: Path) -> None:
    with raises_code("batch-not-divisible"):
        compare("toy", out=tmp_path / "s", variants="euler", processes_per_run=3, **SMALL_GRID, **TOY)
    assert not (tmp_path / "s").exists()


def test_learning_rates_are_tuned_on_a_separate_seed(tmp_path: Path) -> None:
    settings = {"variants": "euler@gpt2", "inits": "gpt2", "seeds": 1, "verdict": False, **TOY}
    comparison = compare("toy", out=tmp_path / "s", tune_lr=True, lr_factors="0.01,1", **settings)
    searches = {search.cell: search for search in comparison.summary.learning_rates}
    assert set(searches) == {"standard@gpt2", "euler@gpt2"}
    for search in searches.values():
        # both cells are best at the upper edge until it is extended beyond 0.6 and 1.2
        assert [trial.lr for trial in search.tried] == pytest.approx([0.003, 0.3, 0.6, 1.2, 2.4])
        assert not search.at_edge
    chosen = {cell: search.chosen for cell, search in searches.items()}
    assert chosen == pytest.approx({"standard@gpt2": 1.2, "euler@gpt2": 0.6})
    assert {(run.phase, run.seed) for run in comparison.runs} == {("tune", TUNING_SEED), ("compare", 0)}
    runs = comparison.folder / "runs"
    assert {run.phase for run in comparison.runs if (runs / run.id / "model").exists()} == {"compare"}
    assert {row["variant"]: row["lr"] for row in comparison.rows} == pytest.approx(
        {"standard": 1.2, "euler@gpt2": 0.6}
    )
    assert StudySummary.from_dict(comparison.summary.to_dict()) == comparison.summary


def test_adaptive_seeds_stop_when_all_verdicts_are_decided(tmp_path: Path) -> None:
    settings = {"variants": "euler@gpt2", "seeds": "auto", "max_seeds": 8, "inits": "gpt2", **TOY}
    comparison = compare("toy", out=tmp_path / "s", **settings)
    (euler,) = comparison.summary.variants
    assert euler.verdict == "helps"
    assert len(euler.seeds) in (3, 4, 5)
    assert comparison.summary.reference.seeds == euler.seeds
    assert comparison.summary.noise_floor.difference.pairs == len(euler.seeds)
    assert comparison.is_complete
    starts = count_starts(tmp_path / "s")
    again = compare("toy", out=tmp_path / "s", **settings)
    assert count_starts(tmp_path / "s") == starts
    assert again.summary == comparison.summary


def test_adaptive_seeds_stop_at_their_maximum(tmp_path: Path) -> None:
    settings = {**TOY, "seeds": "auto", "max_seeds": 4, "margin": 1e-6, "inits": "gpt2", "lr": 1e-9}
    comparison = compare("toy", variants="euler@gpt2,drift@gpt2", out=tmp_path / "s", **settings)
    assert {arm.verdict for arm in comparison.summary.variants} <= {"undecided", "hurts", "helps"}
    assert max(len(arm.seeds) for arm in comparison.summary.arms) <= 4
    assert comparison.summary.power.seeds == 4


@pytest.mark.parametrize(
    "change",
    [
        {"seeds": 4},
        {"seeds": "auto"},
        {"margin": 2.0},
        {"confidence": 0.9},
        {"verdict": False},
        {"tune_lr": True},
        {"baselines": "standard,uncoupled"},
        {"inits": "gpt2"},
        {"inits": "gpt2,fan_in,mimetic"},
        {"variants": "standard,drift"},
    ],
)
def test_plan_is_fixed_once_results_were_seen(comparison: Comparison, change: dict[str, Any]) -> None:
    variants = "standard,euler,broken@gpt2"
    settings = {"variants": variants, **SMALL_GRID, **TOY, **change}
    with raises_code("plan-fixed"):
        compare("toy text", out=comparison.folder, **settings)


def test_noise_floor_and_added_arms(comparison: Comparison) -> None:
    floor = comparison.summary.noise_floor
    assert floor.cell == "standard@gpt2"
    assert floor.difference.low < floor.difference.mean < floor.difference.high
    noise = [run for run in comparison.runs if run.phase == "noise"]
    assert [run.seed for run in noise] == [NOISE_FLOOR_SEED + seed for seed in range(3)]
    assert not any((comparison.folder / "runs" / run.id / "model").exists() for run in noise)
    assert comparison.summary.added_arms == ()
    assert comparison.summary.planned_at.startswith("20")


def test_pilot_tells_the_power_before_the_first_run(
    comparison: Comparison, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"variants": "euler@gpt2", "inits": "gpt2", "seeds": 3, **TOY}
    compare("toy", out=tmp_path / "a", **settings)
    assert "standard deviations of the paired" in " ".join(capsys.readouterr().err.split())
    compare("toy", out=tmp_path / "b", pilot=str(comparison.folder), **settings)
    assert "from the pilot study" in " ".join(capsys.readouterr().err.split())
    with raises_code("not-a-study"):
        compare("toy", out=tmp_path / "c", pilot=str(tmp_path / "nowhere"), **settings)


def test_fixed_learning_rate_is_not_tuned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"variants": "euler{train.lr=0.1}", "inits": "gpt2", "seeds": 1, "verdict": False, **TOY}
    comparison = compare("toy", out=tmp_path / "s", tune_lr=True, lr_factors="2,4,8", **settings)
    assert {search.cell for search in comparison.summary.learning_rates} == {"standard@gpt2"}
    assert [run.lr for run in comparison.compared_runs if run.cell.startswith("euler")] == [0.1]
    assert "train.lr is fixed at 0.1" in capsys.readouterr().err


def test_pool_of_baselines(tmp_path: Path) -> None:
    settings = {"variants": "euler,standard", "inits": "gpt2", "seeds": 3, **TOY}
    baselines = "standard,standard{train.lr=0.6},uncoupled"
    comparison = compare("toy", out=tmp_path / "s", baselines=baselines, **settings)
    plan = StudyPlan.load(StudyDir(tmp_path / "s"))
    assert [(arm.name, arm.role) for arm in plan.arms] == [("baselines", "reference"), ("euler", "variant")]
    pool = {cell.name: cell.variant for cell in plan.arms[0].cells}
    assert list(pool.values()) == ["standard", "standard{train.lr=0.6}", "uncoupled"]
    reference = comparison.summary.reference
    assert reference is not None
    assert pool[reference.cell] == "standard{train.lr=0.6}"  # it learns faster
    assert comparison.is_complete


def test_arms_keep_the_time_they_were_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"inits": "gpt2", "seeds": 1, "verdict": False, **TOY}
    compare("toy", variants="euler", out=tmp_path / "s", **settings)
    study = StudyDir(tmp_path / "s")
    values = study.load()
    created = values["created_at"]
    assert [arm["added_at"] for arm in values["arms"]] == [created] * 2
    values["created_at"] = "2026-01-01T00:00:00+00:00"
    for arm in values["arms"]:
        arm["added_at"] = values["created_at"]
    study.save(values)
    compare("toy", variants="euler,drift", out=tmp_path / "s", **settings)
    plan = StudyPlan.load(study)
    assert plan.created_at == "2026-01-01T00:00:00+00:00"
    pool, euler, drift = plan.arms
    assert (pool.added_at, pool.runs_before) == (euler.added_at, euler.runs_before) == (plan.created_at, 0)
    assert drift.added_at >= created
    assert drift.runs_before == 2


def test_every_tokenizer_is_prepared_once(tmp_path: Path) -> None:
    prepared: list[tuple[str, int]] = []

    def prepare(config: ComparisonConfig) -> dict[str, str]:
        prepared.append((config.tokenizer, config.seq_len))
        return {"fingerprint": f"of {config.tokenizer}"}

    variants = "euler{data.tokenizer=bytes,bpe:512},drift{data.tokenizer=bytes,data.seq_len=16}"
    settings = {"variants": variants, "inits": "gpt2", "seeds": 1, "verdict": False, **TOY}
    comparison = compare("toy", out=tmp_path / "s", **{**settings, "prepare_data": prepare})
    assert prepared == [("bpe:2048", 8), ("bytes", 16), ("bpe:512", 8)]
    for run in comparison.runs:
        config = yaml.safe_load((comparison.folder / "runs" / run.id / "config.yaml").read_text())
        assert config["data"]["fingerprint"] == f"of {config['data']['tokenizer']}"


def test_match_flops_gives_the_more_expensive_model_fewer_tokens(tmp_path: Path) -> None:
    settings = {"variants": "euler", "inits": "gpt2", "seeds": 1, "verdict": False, "match": "flops", **TOY}
    comparison = compare("toy", out=tmp_path / "s", **settings)
    tokens = {row["variant"]: row["tokens"] for row in comparison.rows}
    assert tokens == {"standard": 640, "euler": 512}  # the toy counts 1.25 times the FLOPs for euler
    assert comparison.rows[0]["flops"] == comparison.rows[1]["flops"]
    count = sum(count_starts(tmp_path / "s").values())
    compare("toy", out=tmp_path / "s", **settings)
    assert sum(count_starts(tmp_path / "s").values()) == count


def test_match_flops_keeps_the_tokens_of_the_reference(tmp_path: Path) -> None:
    """Its runs are those of a comparison with equal tokens, also if they are no whole number of steps."""
    settings = {**TOY, "variants": "euler", "inits": "gpt2", "seeds": 1, "verdict": False, "tokens": 650}
    budgets, ids = [], []
    for match in ("tokens", "flops"):
        comparison = compare("toy", out=tmp_path / match, match=match, **settings)
        budgets.append(StudyPlan.load(StudyDir(comparison.folder)).budgets)
        ids.append({run.id for run in comparison.compared_runs if run.cell.startswith("standard")})
    assert budgets == [{"standard": 650, "euler": 650}, {"standard": 650, "euler": 512}]
    assert ids[0] == ids[1]


def test_minutes_are_converted_to_tokens(tmp_path: Path) -> None:
    """Finished calibration runs are written beforehand, so that the speed of this machine does not matter."""
    settings = {"variants": "euler", "inits": "gpt2", "seeds": 1, "verdict": False, "minutes": 0.2}
    settings = {**TOY, **settings, "tokens": None}
    config = ComparisonConfig.parse(
        data="toy", **{k: v for k, v in settings.items() if k in ComparisonConfig.__dataclass_fields__}
    )
    grid, study_dir = build_grid(config, TOY["components"]), StudyDir(tmp_path / "s")
    tokens = dict.fromkeys(("standard", "euler"), COST_STEPS * 32)
    for run in grid.build_runs("cost", COST_SEEDS, tokens_by_model=tokens):
        result = {"status": "finished", "step_seconds": 0.5, "flops_per_token": 1.0}
        study_dir.run_dir(run.id).write_config(run.config)
        (study_dir.run_dir(run.id).path / "result.json").write_text(json.dumps(result))
    arms = tuple(arm.plan() for arm in grid.arms)
    StudyPlan(config, "", arms, {}, jobs=2, runs=()).save(study_dir)
    comparison = compare("toy", out=tmp_path / "s", **settings, jobs=2)
    assert {row["variant"]: row["tokens"] for row in comparison.rows} == {"standard": 768, "euler": 768}
    assert study_dir.load()["budgets"] == {"standard": 24 * 32, "euler": 24 * 32}


def test_affordable_steps() -> None:
    cost = TrainingCost(token_seconds=0.01, flops_per_token=1.0, overhead_seconds=2.0)
    # 10 runs, 4 at a time, are 3 rounds of 20 s, each with 2 s of overhead
    assert affordable_steps(1.0, n_runs=10, jobs=4, cost=cost, tokens_per_step=10) == 180
    with raises_code("minutes-too-short") as error:
        affordable_steps(0.5, n_runs=10, jobs=1, cost=cost, tokens_per_step=10)
    assert "0.67" in str(error.value)


def test_failed_corpus_preparation_writes_nothing(tmp_path: Path) -> None:
    def prepare(config: ComparisonConfig) -> dict[str, Any]:
        raise InputError("unknown corpus", code="unknown-corpus")

    with raises_code("unknown-corpus"):
        compare("toy", variants="euler", out=tmp_path / "s", **{**TOY, "prepare_data": prepare})
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"seeds": 1}, "too-few-seeds"),
        ({"variants": "eulr"}, "unknown-variant"),
        ({"variants": "euler{train.lrr=1}"}, "unknown-key"),
        ({"baselines": "none"}, "no-baselines"),
        ({"engine": "locl"}, "unknown-engine"),
        ({"jobs": 0}, "below-minimum"),
        ({"threads": 0}, "below-minimum"),
        ({"tokens": "lots"}, "invalid-count"),
        ({"lr_factors": "x"}, "invalid-lr-factors"),
        ({"preset": "tinny"}, "unknown-preset"),
        ({"variant": "euler"}, "unknown-setting"),
    ],
)
def test_bad_settings_write_nothing(change: dict[str, Any], code: str, tmp_path: Path) -> None:
    with raises_code(code):
        compare("toy", **{"variants": "euler", **SMALL_GRID, **TOY, **change}, out=tmp_path / "s")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("variant", ["leapfrog:n=0", "slow:P=0"])
def test_models_that_cannot_be_built_write_nothing(variant: str, tmp_path: Path) -> None:
    settings = {key: value for key, value in TOY.items() if key != "components"}
    with pytest.raises(InputError) as error:
        compare("toy", variants=f"standard,{variant}", out=tmp_path / "s", **settings)
    assert f"'{variant}'" in str(error.value)
    assert not (tmp_path / "s").exists()


def _without(key: str, part: str | None = None) -> Callable[[Study], Study]:
    def damage(study: Study) -> Study:
        inner = study if part is None else study[part] if part == "config" else study[part][0]
        del inner[key]
        return study

    return damage


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_without("confidence", "config"), "confidence"),
        (_without("baselines", "config"), "another version"),
        (_without("created_at"), "created_at"),
        (_without("added_at", "arms"), "added_at"),
        (_without("cells", "arms"), "arms"),
        (_without("seed", "runs"), "seed"),
        (_without("budgets"), "budgets"),
        (lambda study: {**study, "config": 5}, "config"),
        (lambda study: {**study, "runs": [5]}, "runs"),
        (lambda study: {**study, "config": {**study["config"], "confidence": "x"}}, "confidence"),
        (lambda study: {**study, "config": {**study["config"], "confidence": 2.0}}, "confidence"),
        (lambda study: {**study, "config": {**study["config"], "margin": float("nan")}}, "margin"),
        (lambda study: {**study, "arms": []}, "reference"),
        (lambda study: {**study, "arms": study["arms"][1:]}, "reference"),
        (lambda study: {**study, "arms": [{**arm, "cells": []} for arm in study["arms"]]}, "cells"),
        (lambda study: {**study, "config": {**study["config"], "starts": ["gpt2"]}}, "config.inits"),
    ],
)
def test_corrupt_study_file(
    comparison: Comparison, damage: Callable[[Study], Study], named: str, tmp_path: Path
) -> None:
    study = damage(yaml.safe_load((comparison.folder / "study.yaml").read_text()))
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    for read in (
        lambda: load_comparison(tmp_path),
        lambda: compare("toy text", variants="standard,euler", out=tmp_path, **SMALL_GRID, **TOY),
    ):
        with raises_code("corrupt-study") as error:
            read()
        assert named in str(error.value)


@pytest.mark.parametrize("content", [b"config: \xff\xfe", b"config: {", b"- 1"])
def test_study_file_that_is_not_yaml(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_bytes(content)
    with raises_code("corrupt-study"):
        load_comparison(tmp_path)


def test_bad_input_of_a_worker_stops_the_comparison(tmp_path: Path) -> None:
    with raises_code("unknown-option") as error:
        compare("toy", variants="picky", inits="gpt2", out=tmp_path / "s", jobs=1, **TOY)
    assert str(error.value).startswith("picky@gpt2: option 'm' of coupling 'picky' is unknown")


def test_unusable_or_locked_folders_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with raises_code("folder-not-empty"):
        compare("toy", variants="euler", out=tmp_path, **TOY)
    with raises_code("not-a-folder"):
        compare("toy", variants="euler", out=tmp_path / "notes.txt", **TOY)
    with StudyDir(tmp_path / "s").lock(), raises_code("folder-locked"):
        compare("toy", variants="euler", out=tmp_path / "s", **TOY)
    with raises_code("not-a-study"):
        load_comparison(tmp_path)


def test_corpus_is_prepared_once_and_its_fingerprint_is_in_every_run(tmp_path: Path) -> None:
    prepared: list[str] = []

    def prepare(config: ComparisonConfig) -> dict[str, str]:
        prepared.append(config.data)
        return {"fingerprint": "abc"}

    settings = {"variants": "euler", "inits": "gpt2", "seeds": 1, "verdict": False, **TOY}
    comparison = compare("toy", out=tmp_path / "s", **{**settings, "prepare_data": prepare})
    assert prepared == ["toy"]
    for run in comparison.runs:
        config = yaml.safe_load((comparison.folder / "runs" / run.id / "config.yaml").read_text())
        assert config["data"]["fingerprint"] == "abc"
