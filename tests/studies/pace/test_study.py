"""A pace study from planning to its outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from input_errors import raises_code
from qkflow.cli import main
from qkflow.studies.pace import PaceStudyConfig, rebuild_pace_study
from qkflow.studies.pace.dataset import load_task_data
from qkflow.studies.pace.recipes import get_recipe
from qkflow.studies.pace.study import plan_runs
from qkflow.studies.pace.task_model import build_task_model
from qkflow.studies.runner.study_dir import StudyDir
from qkflow.training import load_model


def test_single_knob_runs_differ_in_the_ratio_alone() -> None:
    config = PaceStudyConfig("agreement", seeds=1)
    first, second, *_ = (run.config for run in plan_runs(config, config.resolve_recipe(), "data.json", 7, 10))
    assert first["train"].pop("ratio") != second["train"].pop("ratio")
    assert first == second


def test_another_kind_of_study_raises(tmp_path: Path) -> None:
    StudyDir(tmp_path).save({"config": {}, "arms": [], "runs": []})
    with raises_code("not-a-pace-study"):
        rebuild_pace_study(tmp_path)


def test_unknown_task_on_the_command_line(tmp_path: Path) -> None:
    with raises_code("unknown-task"):
        main.dispatch(["pace", "study", "hateexplain", "--out", str(tmp_path / "out")])


def test_command_line_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "study"
    options = ["--examples", "64", "--test", "30", "--seeds", "1", "--measured", "5", "--dim", "16"]
    command = ["pace", "study", "agreement", *options, "--out", str(out), "--json"]
    assert main.dispatch([*command, "--steps", "4", "--ratios", "1"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["runs"] == {"planned": 1, "finished": 1, "failures": []}
    (finished,) = (out / "runs").iterdir()
    before = (finished / "result.json").stat().st_mtime_ns
    assert main.dispatch([*command, "--steps", "4", "--ratios", "1,10"]) == 0
    second = json.loads(capsys.readouterr().out)
    assert (finished / "result.json").stat().st_mtime_ns == before, "a finished run is not repeated"
    assert [row["ratio"] for row in second["rows"]] == ["1", "10"]
    measures = second["rows"][1]["measures"]
    assert {"performance", "mass", "confidence", "comprehensiveness", "qk_scale"} <= measures.keys()
    assert second["published"]["performance"] == [0.9243, 0.9341]
    page = (out / "report.html").read_text()
    assert "http://" not in page.split("<script>")[0]
    assert 'id="heatmap-0"' in page
    assert json.loads((out / "summary.json").read_text())["headline"] == second["headline"]
    (out / "report.html").unlink()
    assert main.dispatch(["report", str(out)]) == 0
    assert "published, faster" in capsys.readouterr().out
    assert (out / "report.html").is_file()
    with raises_code("other-study") as raised:
        main.dispatch([*command, "--steps", "5"])
    assert "steps 4, not 5" in str(raised.value)


def test_study_of_a_pretrained_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"the key near the {word} is old" for word in ("cabinets", "door") * 60))
    model = tmp_path / "model"
    sizes = ["--set", "model.n_layers=1", "--set", "model.dim=16", "--set", "model.n_heads=2"]
    data = ["--data", str(text), "--tokenizer", "bpe:300", "--seq-len", "16", "--batch-size", "4"]
    assert main.dispatch(["train", str(model), *data, *sizes, "--steps", "3"]) == 0
    out = tmp_path / "study"
    limits = ["--examples", "64", "--test", "30", "--seeds", "1", "--measured", "5", "--steps", "2"]
    command = ["pace", "study", "agreement", *limits, "--ratios", "1", "--pretrained", str(model)]
    assert main.dispatch([*command, "--out", str(out), "--json"]) == 0
    capsys.readouterr()
    decoder, tokenizer = load_model(model)
    (run,) = (out / "runs").iterdir()
    head = decoder.config.dim * 2 + 2
    weights = sum(parameter.numel() for parameter in decoder.parameters())
    assert json.loads((run / "result.json").read_text())["parameters"] == weights + head
    recipe = StudyDir(out).load()["recipe"]
    assert (recipe["n_layers"], recipe["dim"], recipe["n_heads"]) == (1, 16, 2)
    data_file = next(out.glob("data-*.json"))
    assert load_task_data(out, data_file.name).vocab_size == tokenizer.vocab_size
    started = build_task_model(get_recipe("agreement", False), load_task_data(out, data_file.name), 0, model)
    assert torch.equal(started.decoder.embedding.weight, decoder.embedding.weight)
    with raises_code("size-of-pretrained"):
        main.dispatch([*command, "--dim", "8", "--out", str(tmp_path / "other")])
    with raises_code("model-not-found"):
        main.dispatch([*command[:-1], str(tmp_path / "absent"), "--out", str(tmp_path / "other")])
    assert not (tmp_path / "other").exists()
