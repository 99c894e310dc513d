"""`qkflow eval --tasks` as a user types it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from input_errors import raises_code
from qkflow import hf
from qkflow.cli import main
from qkflow.data.tokenizer import ByteTokenizer
from qkflow.models import Decoder, ModelConfig
from qkflow.training import pretrained

TASK = """
task: rhymes
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{line}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run, the same model as a `transformers` folder, and a task of local files."""
    place = tmp_path_factory.mktemp("eval")
    shape = ModelConfig.from_dict({"vocab_size": 257, "n_layers": 1, "dim": 32, "n_heads": 2})
    weights = pretrained.full_state_dict(Decoder(shape, seed=0))
    pretrained.save_model(place / "run" / "model", shape, weights, ByteTokenizer())
    hf.export_model(place / "run", place / "exported")
    rows = [{"line": "the cat sat on the", "choices": [" mat", " zx"], "answer": 0}] * 3
    (place / "rhymes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "tasks").mkdir()
    (place / "tasks" / "rhymes.yaml").write_text(TASK.format(data=place / "rhymes.jsonl"))
    return place


def test_tasks_of_a_run_and_its_export_agree(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval")
    results = []
    for model, task in (
        ("run", ["rhymes", "--include", place / "tasks"]),
        ("exported", [place / "tasks/rhymes.yaml"]),
    ):
        options = ["--limit", 2, "--shots", 0, "--device", "cpu", "--json"]
        arguments = ["eval", place / model, "--tasks", *task, *options]
        assert main.dispatch([str(word) for word in arguments]) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert results[0]["model"] == str(place / "run")
    assert results[0]["tasks"] == results[1]["tasks"]
    assert set(results[0]["tasks"]["rhymes"]) == {"acc", "acc_stderr"}


@pytest.mark.parametrize(
    ("flags", "code", "named"),
    [
        (["--limit", "3"], "needs-tasks", "--limit"),
        (["--coupling", "somewhere"], "needs-tasks", "--coupling"),
        (["--tasks", "a", "--data", "speeches"], "conflicts-with-tasks", "--data"),
        (["--tasks", "a", "--seq-len", "8"], "conflicts-with-tasks", "--seq-len"),
        (["--tasks", "a", "--limit", "0"], "below-minimum", "--limit"),
        (["--seq-len", "0"], "below-minimum", "--seq-len"),
    ],
)
def test_options_without_effect_are_refused(place: Path, flags: list[str], code: str, named: str) -> None:
    with raises_code(code) as caught:
        main.dispatch(["eval", str(place / "run"), *flags])
    assert named in str(caught.value)


def test_missing_package_and_files_of_tasks(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["eval", str(place / "run"), "--tasks"]
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "lm_eval", None)
        with raises_code("missing-dependency") as caught:
            main.dispatch([*arguments, "rhymes"])
    assert 'pip install "qkflow[eval]"' in str(caught.value)
    pytest.importorskip("lm_eval")
    with raises_code("folder-not-found"):
        main.dispatch([*arguments, "rhymes", "--include", "nowhere"])
    moved = place / "moved.yaml"
    moved.write_text(TASK.format(data=place / "gone.jsonl"))
    with raises_code("task-data-unreadable") as caught:
        main.dispatch([*arguments, str(moved)])
    assert "moved.yaml" in str(caught.value)
    assert "gone.jsonl" in str(caught.value)
