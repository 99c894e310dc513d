"""A whole comparison with fine-tuning: real training of a small model, and real files."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from in_process_engine import InProcessEngine
from input_errors import raises_code
from qkflow.cli.main import dispatch, main
from qkflow.models.presets import PRESETS, Preset
from qkflow.report import write_outputs
from qkflow.studies import Comparison, StudySummary, compare, load_comparison
from qkflow.studies.runner import engines
from qkflow.training.run_dir import read_result

FINETUNE = {"finetune": "glue:sst-2", "finetune_epochs": 8, "finetune_lr": 1e-2}


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of runs that are started."""
    monkeypatch.setattr("qkflow.studies.runner.LocalEngine", InProcessEngine)
    monkeypatch.setitem(PRESETS, "tiny", Preset(1, 32, 2, "gelu", 257, "smaller than tiny"))
    monkeypatch.setattr("qkflow.studies.runner.execution.POLL_INTERVAL", 0.0)
    InProcessEngine.started.clear()
    return InProcessEngine.started


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    corpus = tmp_path_factory.mktemp("corpus") / "text.txt"
    corpus.write_text("the river moves under the stone and sings again.\n\n" * 200)
    return {
        "data": str(corpus),
        "variants": "euler",
        "controls": "none",
        "inits": "gpt2",
        "seeds": 3,
        "tokenizer": "bytes",
        "tokens": 256,
        "seq_len": 32,
        "batch_size": 4,
        "device": "cpu",
        "out": tmp_path_factory.mktemp("studies") / "study",
    }


@pytest.fixture
def comparison(settings: dict[str, Any], glue_folder: Path, in_process: list[str]) -> Comparison:
    """The comparison with all fine-tuning runs finished; trained once, then resumed."""
    result = compare(**settings, **FINETUNE, finetune_data=str(glue_folder))
    in_process.clear()
    return result


def test_finetune_is_added_to_a_finished_comparison(
    settings: dict[str, Any], glue_folder: Path, in_process: list[str]
) -> None:
    assert compare(**settings).summary.finetune == ()
    for finetuned in (Path(settings["out"]) / "runs").glob("*SST-2*"):  # of an earlier test
        shutil.rmtree(finetuned)
    in_process.clear()
    comparison = compare(**settings, **FINETUNE, finetune_data=str(glue_folder))
    assert len(in_process) == 6
    assert all("SST-2" in name for name in in_process)
    assert [(run.cell, run.seed) for run in comparison.runs if run.phase == "finetune"] == [
        (f"{cell}@gpt2/SST-2", seed) for seed in range(3) for cell in ("standard", "euler")
    ]


def test_finished_runs_are_not_repeated(
    comparison: Comparison, settings: dict[str, Any], glue_folder: Path, in_process: list[str]
) -> None:
    again = compare(**settings, **FINETUNE, finetune_data=str(glue_folder))
    assert in_process == []
    assert again.summary == comparison.summary


def test_finetuned_models_learn_the_task(comparison: Comparison) -> None:
    assert comparison.is_complete
    (task,) = comparison.summary.finetune
    assert task.majority == 50
    assert [arm.variant for arm in task.arms] == ["standard", "euler"]
    assert all(len(arm.seeds) == 3 and arm.score is not None and arm.score > 90 for arm in task.arms)
    assert task.arms[1].difference is not None
    assert task.arms[1].difference.pairs == 3


def test_result_of_a_run(comparison: Comparison) -> None:
    run = next(run for run in comparison.runs if run.phase == "finetune")
    result = read_result(comparison.folder / "runs" / run.id)
    assert result is not None
    assert (result["status"], result["task"], result["metric"]) == ("finished", "glue:SST-2", "accuracy")
    assert result["majority"] == {"accuracy": 0.5}
    assert (result["train_examples"], result["validation_examples"]) == (96, 40)
    assert result["steps"] == 24


def test_outputs(comparison: Comparison, capsys: pytest.CaptureFixture[str]) -> None:
    write_outputs(comparison)
    summary = json.loads((comparison.folder / "summary.json").read_text())
    assert StudySummary.from_dict(summary) == comparison.summary == load_comparison(comparison.folder).summary
    with open(comparison.folder / "finetune.csv", newline="") as file:
        assert [(row["task"], row["variant"]) for row in csv.DictReader(file)] == [
            ("glue:SST-2", "standard"),
            ("glue:SST-2", "euler"),
        ]
    page = (comparison.folder / "report.html").read_text()
    assert "After fine-tuning" in page
    assert "glue:SST-2" in page
    assert dispatch(["report", str(comparison.folder)]) == 0
    assert "glue:SST-2: the reference scores" in " ".join(capsys.readouterr().out.split())


def test_same_seed_gives_the_same_score_in_a_worker_process(
    comparison: Comparison, settings: dict[str, Any], glue_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = next(run for run in comparison.runs if run.phase == "finetune")
    shutil.rmtree(comparison.folder / "runs" / run.id)
    monkeypatch.setattr("qkflow.studies.runner.LocalEngine", engines.LocalEngine)
    again = compare(**settings, **FINETUNE, finetune_data=str(glue_folder))
    assert again.summary.finetune == comparison.summary.finetune


def test_run_that_diverges_fails(
    comparison: Comparison, settings: dict[str, Any], glue_folder: Path, in_process: list[str]
) -> None:
    options = {**FINETUNE, "finetune_lr": 1e30, "finetune_data": str(glue_folder)}
    diverged = compare(**settings, **options)
    failed = diverged.summary.finetune[0].runs.failed
    assert len(failed) == 6
    assert "not finite" in failed[0].error
    assert not diverged.is_complete
    assert "6 of 6 fine-tuning runs failed" in diverged.summary.finetune[0].sentence


def test_report_needs_no_task_data(comparison: Comparison, tmp_path: Path) -> None:
    """A study that was copied from another machine."""
    folder = Path(shutil.copytree(comparison.folder, tmp_path / "copied"))
    plan = folder / "study.yaml"
    text = re.sub("finetune_data: .*(\n    .*)*", "finetune_data: /nowhere", plan.read_text())
    plan.write_text(text)
    assert load_comparison(folder).summary.finetune == comparison.summary.finetune


def test_missing_model_is_rejected(
    comparison: Comparison, settings: dict[str, Any], glue_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "copy"
    shutil.copytree(comparison.folder, out)
    shutil.rmtree(next((out / "runs").glob("euler-gpt2.s1.*")) / "model")
    with raises_code("model-not-found"):
        compare(**{**settings, "out": out}, **FINETUNE, finetune_data=str(glue_folder))


def test_bad_data_is_rejected_before_training(
    settings: dict[str, Any], tmp_path: Path, glue_folder: Path
) -> None:
    out = tmp_path / "new"
    with raises_code("split-not-found"):
        compare(**{**settings, "out": out}, finetune="glue:RTE", finetune_data=str(glue_folder))
    assert not out.exists()


def test_exit_code_of_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing, out = tmp_path / "missing", tmp_path / "out"
    command = ["compare", "--finetune", "glue:RTE", "--finetune-data", str(missing), "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["qkflow", *command])
    with pytest.raises(SystemExit) as error:
        main()
    assert error.value.code == 2
    assert "[path-not-found]" in capsys.readouterr().err
    assert not out.exists()
