"""`qkflow eval --tasks` as a user types it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from qkflow import hf
from qkflow.cli import main
from qkflow.data.tokenizer import ByteTokenizer
from qkflow.errors import InputError
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
    """A run of ours, the same model as a `transformers` folder, and a task made of local files."""
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


def test_tasks_of_a_run_and_of_its_export_agree(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval")
    found = []
    for model, task in (
        ("run", ["rhymes", "--include", place / "tasks"]),
        ("exported", [place / "tasks/rhymes.yaml"]),
    ):
        asked = [
            "eval",
            place / model,
            "--tasks",
            *task,
            "--limit",
            2,
            "--shots",
            0,
            "--device",
            "cpu",
            "--json",
        ]
        assert main.dispatch([str(word) for word in asked]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["model"] == str(place / "run")
    assert found[0]["tasks"] == found[1]["tasks"]
    assert set(found[0]["tasks"]["rhymes"]) == {"acc", "acc_stderr"}


def test_flags_that_would_do_nothing_are_refused(place: Path) -> None:
    for wrong, said in (
        (["--limit", "3"], "--limit needs --tasks"),
        (["--coupling", "somewhere"], "--coupling needs --tasks"),
        (["--tasks", "a", "--data", "speeches"], "--data does not go with --tasks"),
        (["--tasks", "a", "--limit", "0"], "--limit must be at least 1"),
        (["--seq-len", "0"], "--seq-len must be at least 1"),
    ):
        with pytest.raises(InputError, match=said):
            main.dispatch(["eval", str(place / "run"), *wrong])


def test_what_is_missing_is_said_in_one_sentence(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["eval", str(place / "run"), "--tasks"]
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "lm_eval", None)
        with pytest.raises(InputError, match=r'pip install "qkflow\[eval\]"'):
            main.dispatch([*asked, "rhymes"])
    pytest.importorskip("lm_eval")
    with pytest.raises(InputError, match="there is no folder 'nowhere'"):
        main.dispatch([*asked, "rhymes", "--include", "nowhere"])
    elsewhere = place / "moved.yaml"
    elsewhere.write_text(TASK.format(data=place / "gone.jsonl"))
    with pytest.raises(InputError, match=r"questions of .*moved.yaml' cannot be read .*gone.jsonl"):
        main.dispatch([*asked, str(elsewhere)])
