from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from families import tiny
from qkflow import hub
from qkflow.commands.hub import evaluate_tasks
from qkflow.data.tokenizer import ByteTokenizer
from qkflow.errors import InputError
from qkflow.hub.evaluation import _task_file
from qkflow.hub.folders import fast_tokenizer
from qkflow.models import Decoder, ModelConfig
from qkflow.training import model_folder

pytest.importorskip("lm_eval")

QUESTIONS = [
    {"question": "to be or not to", "choices": [" be", " zq"], "answer": 0},
    {"question": "that is the", "choices": [" xx", " question"], "answer": 1},
    {"question": "the rest is", "choices": [" silence", " ##"], "answer": 0},
]


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A multiple-choice task made of local files."""
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    file = tmp_path / "tasks" / "tiny_choice.yaml"
    file.parent.mkdir()
    file.write_text(
        f"""
task: tiny_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
"""
    )
    return file


def expected(logits_of: object, words: object) -> float:
    """The harness's accuracy by hand: the choice whose tokens are likelier."""
    right = 0
    for row in QUESTIONS:
        scores = []
        for choice in row["choices"]:
            context, whole = words(row["question"])["input_ids"], words(row["question"] + choice)["input_ids"]
            with torch.no_grad():
                log_probabilities = logits_of(torch.tensor([whole]))[0].log_softmax(-1)
            spots = range(len(context) - 1, len(whole) - 1)
            scores.append(sum(float(log_probabilities[spot, whole[spot + 1]]) for spot in spots))
        right += scores.index(max(scores)) == row["answer"]
    return right / len(QUESTIONS)


def test_a_run_of_ours_is_evaluated_on_local_files(task: Path, tmp_path: Path) -> None:
    shape = ModelConfig.from_dict(
        {"vocabulary": 257, "layers": 1, "width": 32, "heads": 2, "start": "fan_in"}
    )
    model = Decoder(shape, seed=1).eval()
    model_folder.save(tmp_path / "run" / "model", shape, model_folder.full_weights(model), ByteTokenizer())
    found = hub.evaluate(tmp_path / "run", [str(task)])
    by_hand = expected(lambda ids: model.logits(model(ids)), fast_tokenizer(ByteTokenizer()))
    assert found["tiny_choice"]["acc"] == pytest.approx(by_hand)
    assert math.isfinite(found["tiny_choice"]["acc_stderr"])


def test_a_coupled_model_is_evaluated_and_tasks_are_found_in_a_folder(task: Path) -> None:
    words = fast_tokenizer(ByteTokenizer())
    model = hub.attach(tiny("llama", vocab_size=257, pad_token_id=256), "drift", step=5.0)
    found = hub.evaluate(model, ["tiny_choice"], tokenizer=words, include=task.parent, limit=3)
    assert found["tiny_choice"]["acc"] == pytest.approx(
        expected(lambda ids: model(input_ids=ids).logits, words)
    )


def test_the_command_shows_tasks_and_nothing_else(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = fast_tokenizer(ByteTokenizer())
    model = hub.attach(tiny("llama", vocab_size=257, pad_token_id=256), "drift", step=5.0)
    hub.save(model, tmp_path / "coupling")
    hub.detach(model).save_pretrained(tmp_path / "llama")
    words.save_pretrained(tmp_path / "llama")
    capsys.readouterr()
    options = {"coupling": tmp_path / "coupling", "limit": 2}
    evaluate_tasks(tmp_path / "llama", str(task), json=True, **options)
    said = json.loads(capsys.readouterr().out)
    assert set(said["tasks"]["tiny_choice"]) == {"acc", "acc_stderr"}
    evaluate_tasks(tmp_path / "llama", str(task), **options)
    assert "tiny_choice" in capsys.readouterr().out


def test_unknown_tasks_are_refused(task: Path) -> None:
    model, words = tiny("llama", vocab_size=257), fast_tokenizer(ByteTokenizer())
    with pytest.raises(InputError, match=r"knows no task 'helaswag'"):
        _task_file("helaswag")  # through `evaluate` the harness would first read its thousands of tasks
    with pytest.raises(InputError, match=r"there is no task file 'nowhere.yaml'"):
        hub.evaluate(model, ["nowhere.yaml"], tokenizer=words)
    with pytest.raises(InputError, match=r"name at least one task"):
        hub.evaluate(model, [], tokenizer=words)
    with pytest.raises(InputError, match=r"needs its tokenizer"):
        hub.evaluate(model, [str(task)])
