from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from families import tiny
from input_errors import raises_code
from qkflow import hf
from qkflow.cli.commands.hf import evaluate_tasks
from qkflow.data.tokenizer import ByteTokenizer
from qkflow.hf.lm_eval import _resolve_task_file
from qkflow.hf.pretrained import to_fast_tokenizer
from qkflow.models import Decoder, ModelConfig
from qkflow.training import pretrained

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


def expected(logits_of: object, tokenizer: object) -> float:
    """Return the accuracy of the harness, computed directly: the choice with the more probable tokens."""
    right = 0
    for row in QUESTIONS:
        scores = []
        for choice in row["choices"]:
            context, whole = (
                tokenizer(row["question"])["input_ids"],
                tokenizer(row["question"] + choice)["input_ids"],
            )
            with torch.no_grad():
                log_probabilities = logits_of(torch.tensor([whole]))[0].log_softmax(-1)
            spots = range(len(context) - 1, len(whole) - 1)
            scores.append(sum(float(log_probabilities[spot, whole[spot + 1]]) for spot in spots))
        right += scores.index(max(scores)) == row["answer"]
    return right / len(QUESTIONS)


def test_evaluate_run_folder(task: Path, tmp_path: Path) -> None:
    shape = ModelConfig.from_dict(
        {"vocab_size": 257, "n_layers": 1, "dim": 32, "n_heads": 2, "init": "fan_in"}
    )
    model = Decoder(shape, seed=1).eval()
    pretrained.save_model(
        tmp_path / "run" / "model", shape, pretrained.full_state_dict(model), ByteTokenizer()
    )
    results = hf.evaluate(tmp_path / "run", [str(task)])
    accuracy = expected(lambda ids: model.logits(model(ids)), to_fast_tokenizer(ByteTokenizer()))
    assert results["tiny_choice"]["acc"] == pytest.approx(accuracy)
    assert math.isfinite(results["tiny_choice"]["acc_stderr"])


def test_evaluate_coupled_model_with_include_path(task: Path) -> None:
    tokenizer = to_fast_tokenizer(ByteTokenizer())
    model = hf.attach(tiny("llama", vocab_size=257, pad_token_id=256), "drift", step=5.0)
    results = hf.evaluate(model, ["tiny_choice"], tokenizer=tokenizer, include_path=task.parent, limit=3)
    assert results["tiny_choice"]["acc"] == pytest.approx(
        expected(lambda ids: model(input_ids=ids).logits, tokenizer)
    )


def test_command_output(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = to_fast_tokenizer(ByteTokenizer())
    model = hf.attach(tiny("llama", vocab_size=257, pad_token_id=256), "drift", step=5.0)
    hf.save_adapter(model, tmp_path / "coupling")
    hf.detach(model).save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    capsys.readouterr()
    options = {"coupling": tmp_path / "coupling", "limit": 2}
    evaluate_tasks(tmp_path / "llama", str(task), json=True, **options)
    printed = json.loads(capsys.readouterr().out)
    assert set(printed["tasks"]["tiny_choice"]) == {"acc", "acc_stderr"}
    evaluate_tasks(tmp_path / "llama", str(task), **options)
    assert "tiny_choice" in capsys.readouterr().out


def test_unknown_tasks_are_refused(task: Path) -> None:
    model, tokenizer = tiny("llama", vocab_size=257), to_fast_tokenizer(ByteTokenizer())
    with raises_code("unknown-task"):
        _resolve_task_file("helaswag")  # `evaluate` would index thousands of built-in tasks first
    with raises_code("task-file-not-found"):
        hf.evaluate(model, ["nowhere.yaml"], tokenizer=tokenizer)
    with raises_code("no-tasks"):
        hf.evaluate(model, [], tokenizer=tokenizer)
    with raises_code("no-tokenizer"):
        hf.evaluate(model, [str(task)])


def model_and_tokenizer() -> tuple[Any, Any]:
    return tiny("llama", vocab_size=257, pad_token_id=256), to_fast_tokenizer(ByteTokenizer())


# change of the task file, error code, offending value
MISTAKES = {
    "broken YAML": (("task: tiny_choice", "task: [x"), "invalid-task-file", "not valid YAML"),
    "no name": (("task: tiny_choice", ""), "invalid-task-file", "'task'"),
    "no dataset": (("dataset_path: json", ""), "invalid-task-file", "'dataset_path'"),
    "split": (("test_split: test", "test_split: tst"), "invalid-task", "'tst'"),
    "type": (("multiple_choice", "multichoice"), "invalid-task", "'multichoice'"),
    "template": (("{{question}}", "{{question"), "invalid-task", "unexpected end of template"),
    "column of texts": (("{{question}}", "{{qustion}}"), "invalid-task", "'qustion'"),
    "column of choices": (("{{choices}}", "{{chices}}"), "invalid-task", "'chices'"),
    "column of answers": (("doc_to_target: answer", "doc_to_target: anser"), "invalid-task-data", "'anser'"),
    "key": (("target_delimiter", "delimiter"), "invalid-task", "'delimiter'"),
    "metric": (("metric: acc", "metric: accur"), "invalid-task", "metric_list"),
    "function": (("target: answer", "target: !function nowhere.f"), "invalid-task-file", "!function"),
    "include": (("task: tiny_choice", "include: tiny_choice.yaml"), "invalid-task-file", "includes itself"),
    "group": (("task: tiny_choice", "group: tiny"), "task-group-file", "'tiny'"),
    "file": (("questions.jsonl", "gone.jsonl"), "task-data-unreadable", "gone.jsonl"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_task_files(task: Path, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any) -> None:
        raise ConnectionError

    monkeypatch.setattr("evaluate.load", offline)  # where the harness looks for metrics it does not have
    (before, after), code, value = MISTAKES[mistake]
    assert before in task.read_text()
    task.write_text(task.read_text().replace(before, after))
    model, tokenizer = model_and_tokenizer()
    with raises_code(code) as caught:
        hf.evaluate(model, [str(task)], tokenizer=tokenizer)
    assert "tiny_choice" in str(caught.value)
    assert value in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_task_file_runs_code(task: Path) -> None:
    """Not by a tag, not by a file that it includes, not by a template."""
    code = task.with_name("evil.py")
    code.write_text("raise SystemExit\n")
    content = task.read_text()
    task.with_name("other.yaml").write_text("process_docs: !function evil.f\n")
    model, tokenizer = model_and_tokenizer()
    for text in (f"include: other.yaml\n{content}", content):  # the folder has another file with the tag
        task.write_text(text)
        with raises_code("invalid-task-file"):
            hf.evaluate(model, ["tiny_choice"], tokenizer=tokenizer, include_path=task.parent)
    task.with_name("other.yaml").unlink()
    touched = task.with_name("touched")
    template = f"{{{{cycler.__init__.__globals__.os.mkdir('{touched}')}}}}"
    task.write_text(content.replace('"{{question}}"', json.dumps(template)))
    with raises_code("invalid-task"):
        hf.evaluate(model, [str(task)], tokenizer=tokenizer)
    assert not touched.exists()


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "task"])
def test_task_file_without_mapping(task: Path, text: str) -> None:
    task.write_text(text)
    model, tokenizer = model_and_tokenizer()
    with raises_code("invalid-task-file"):
        hf.evaluate(model, [str(task)], tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("text", "code", "value"),
    [
        ("{not json", "invalid-task", "JSON parse error"),
        ("", "invalid-task", "no documents"),
        (json.dumps({**QUESTIONS[0], "answer": 7}), "invalid-task", "first answer"),
        (
            json.dumps(QUESTIONS[0]) + "\n" + json.dumps({**QUESTIONS[1], "answer": 7}),
            "invalid-task-data",
            "answer 7",
        ),
    ],
)
def test_mistakes_in_task_data(task: Path, text: str, code: str, value: str) -> None:
    (task.parents[1] / "questions.jsonl").write_text(text)
    model, tokenizer = model_and_tokenizer()
    with raises_code(code) as caught:
        hf.evaluate(model, [str(task)], tokenizer=tokenizer)
    assert value in str(caught.value)


def test_num_fewshot_larger_than_data(task: Path) -> None:
    model, tokenizer = model_and_tokenizer()
    with raises_code("invalid-task"):
        hf.evaluate(model, [str(task)], tokenizer=tokenizer, num_fewshot=100)


def test_model_errors_are_not_task_errors(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = model_and_tokenizer()

    def broken(*_: Any) -> None:
        raise KeyError("mine")

    monkeypatch.setattr(model, "forward", broken)
    with pytest.raises(KeyError, match="mine"):
        hf.evaluate(model, [str(task)], tokenizer=tokenizer)


def test_cause_is_kept(task: Path) -> None:
    task.write_text(task.read_text().replace("test_split: test", "test_split: tst"))
    model, tokenizer = model_and_tokenizer()
    with raises_code("invalid-task") as caught:
        hf.evaluate(model, [str(task)], tokenizer=tokenizer)
    assert isinstance(caught.value.__cause__, KeyError)


def test_data_files_relative_to_task(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task.write_text(task.read_text().replace(str(tmp_path / "questions.jsonl"), "questions.jsonl"))
    (tmp_path / "questions.jsonl").rename(task.parent / "questions.jsonl")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    model, tokenizer = model_and_tokenizer()
    by_path = hf.evaluate(model, ["../tasks/tiny_choice.yaml"], tokenizer=tokenizer)
    by_name = hf.evaluate(model, ["tiny_choice"], tokenizer=tokenizer, include_path="../tasks")
    assert by_path == by_name
    assert Path.cwd() == tmp_path / "elsewhere"


def test_groups_and_duplicate_tasks(task: Path) -> None:
    model, tokenizer = model_and_tokenizer()
    (task.parent / "tiny.yaml").write_text("group: tiny\ntask: [tiny_choice]\n")
    results = hf.evaluate(model, ["tiny"], tokenizer=tokenizer, include_path=task.parent)
    assert "acc" in results["tiny_choice"]
    other = task.with_name("other.yaml")
    other.write_text(task.read_text())
    with raises_code("duplicate-task"):
        hf.evaluate(model, [str(task), str(other)], tokenizer=tokenizer)


def test_coupling_with_loaded_model_is_refused(task: Path, tmp_path: Path) -> None:
    model, tokenizer = model_and_tokenizer()
    with raises_code("coupling-with-loaded-model"):
        hf.evaluate(model, [str(task)], tokenizer=tokenizer, coupling=tmp_path / "nowhere")


@pytest.mark.parametrize("fails", [False, True])
def test_train_mode_and_rng_are_restored(task: Path, fails: bool) -> None:
    model, tokenizer = model_and_tokenizer()
    model.train()
    model.model.layers[0].eval()  # as with a frozen layer
    modes = [module.training for module in model.modules()]

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    expected = draw()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    if fails:
        with raises_code("invalid-task"):
            hf.evaluate(model, [str(task)], tokenizer=tokenizer, num_fewshot=100)
    else:
        hf.evaluate(model, [str(task)], tokenizer=tokenizer)
    assert draw() == expected
    assert [module.training for module in model.modules()] == modes


def test_nan_scores_are_refused(task: Path) -> None:
    model, tokenizer = model_and_tokenizer()
    torch.nn.init.constant_(model.model.norm.weight, math.nan)
    with raises_code("nan-scores"):
        hf.evaluate(model, [str(task)], tokenizer=tokenizer)
