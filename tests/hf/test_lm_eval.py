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
from qkflow import hf
from qkflow.cli.commands.hf import evaluate_tasks
from qkflow.data.tokenizer import ByteTokenizer
from qkflow.errors import InputError
from qkflow.hf.lm_eval import _resolve_task_file
from qkflow.hf.pretrained import to_fast_tokenizer
from qkflow.models import Decoder, ModelConfig
from qkflow.training import pretrained

pytest.importorskip("lm_eval")

QUESTIONS = [
    {"config": "to be or not to", "choices": [" be", " zq"], "answer": 0},
    {"config": "that is the", "choices": [" xx", " question"], "answer": 1},
    {"config": "the rest is", "choices": [" silence", " ##"], "answer": 0},
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
            context, whole = words(row["config"])["input_ids"], words(row["config"] + choice)["input_ids"]
            with torch.no_grad():
                log_probabilities = logits_of(torch.tensor([whole]))[0].log_softmax(-1)
            spots = range(len(context) - 1, len(whole) - 1)
            scores.append(sum(float(log_probabilities[spot, whole[spot + 1]]) for spot in spots))
        right += scores.index(max(scores)) == row["answer"]
    return right / len(QUESTIONS)


def test_a_run_of_ours_is_evaluated_on_local_files(task: Path, tmp_path: Path) -> None:
    shape = ModelConfig.from_dict(
        {"vocab_size": 257, "n_layers": 1, "dim": 32, "n_heads": 2, "init": "fan_in"}
    )
    model = Decoder(shape, seed=1).eval()
    pretrained.save_model(
        tmp_path / "run" / "model", shape, pretrained.full_state_dict(model), ByteTokenizer()
    )
    found = hf.evaluate(tmp_path / "run", [str(task)])
    by_hand = expected(lambda ids: model.logits(model(ids)), to_fast_tokenizer(ByteTokenizer()))
    assert found["tiny_choice"]["acc"] == pytest.approx(by_hand)
    assert math.isfinite(found["tiny_choice"]["acc_stderr"])


def test_a_coupled_model_is_evaluated_and_tasks_are_found_in_a_folder(task: Path) -> None:
    words = to_fast_tokenizer(ByteTokenizer())
    model = hf.attach(tiny("llama", vocab_size=257, pad_token_id=256), "drift", step=5.0)
    found = hf.evaluate(model, ["tiny_choice"], tokenizer=words, include_path=task.parent, limit=3)
    assert found["tiny_choice"]["acc"] == pytest.approx(
        expected(lambda ids: model(input_ids=ids).logits, words)
    )


def test_the_command_shows_tasks_and_nothing_else(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = to_fast_tokenizer(ByteTokenizer())
    model = hf.attach(tiny("llama", vocab_size=257, pad_token_id=256), "drift", step=5.0)
    hf.save_adapter(model, tmp_path / "coupling")
    hf.detach(model).save_pretrained(tmp_path / "llama")
    words.save_pretrained(tmp_path / "llama")
    capsys.readouterr()
    options = {"coupling": tmp_path / "coupling", "limit": 2}
    evaluate_tasks(tmp_path / "llama", str(task), json=True, **options)
    said = json.loads(capsys.readouterr().out)
    assert set(said["tasks"]["tiny_choice"]) == {"acc", "acc_stderr"}
    evaluate_tasks(tmp_path / "llama", str(task), **options)
    assert "tiny_choice" in capsys.readouterr().out


def test_unknown_tasks_are_refused(task: Path) -> None:
    model, words = tiny("llama", vocab_size=257), to_fast_tokenizer(ByteTokenizer())
    with pytest.raises(InputError, match=r"knows no task 'helaswag'"):
        _resolve_task_file(
            "helaswag"
        )  # through `evaluate` the harness would first read its thousands of tasks
    with pytest.raises(InputError, match=r"there is no task file 'nowhere.yaml'"):
        hf.evaluate(model, ["nowhere.yaml"], tokenizer=words)
    with pytest.raises(InputError, match=r"name at least one task"):
        hf.evaluate(model, [], tokenizer=words)
    with pytest.raises(InputError, match=r"needs its tokenizer"):
        hf.evaluate(model, [str(task)])


def model_and_words() -> tuple[Any, Any]:
    return tiny("llama", vocab_size=257, pad_token_id=256), to_fast_tokenizer(ByteTokenizer())


# what is changed in the task file, and what is said of it
MISTAKES = {
    "broken YAML": (
        ("task: tiny_choice", "task: [x"),
        r"cannot be run: while parsing a flow sequence .* line",
    ),
    "no name": (("task: tiny_choice", ""), r"has no 'task'"),
    "no dataset": (("dataset_path: json", ""), r"has no 'dataset_path'"),
    "split": (("test_split: test", "test_split: tst"), r"it names 'tst', which is no split or column"),
    "type": (("multiple_choice", "multichoice"), r"invalid output_type 'multichoice'"),
    "template": (("{{question}}", "{{question"), r"unexpected end of template"),
    "column of texts": (("{{question}}", "{{qustion}}"), r"'qustion' is undefined"),
    "column of choices": (("{{choices}}", "{{chices}}"), r"'chices' is undefined"),
    "column of answers": (
        ("doc_to_target: answer", "doc_to_target: anser"),
        r"the answer 'anser', .* 2 choices",
    ),
    "key": (("target_delimiter", "delimiter"), r"unexpected keyword argument 'delimiter'"),
    "metric": (("metric: acc", "metric: accur"), r"names a metric that the harness does not know"),
    "function": (("target: answer", "target: !function nowhere.f"), r"Cannot import module 'nowhere'"),
    "group": (("task: tiny_choice", "group: tiny"), r"describes a group, .* ask for 'tiny', with `include`"),
    "file": (
        ("questions.jsonl", "gone.jsonl"),
        r"cannot be read \(Unable to find '.*gone.jsonl'\): data files",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_task_is_one_sentence(
    task: Path, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: Any) -> None:
        raise ConnectionError

    monkeypatch.setattr("evaluate.load", offline)  # where the harness looks for metrics it does not have
    (before, after), said = MISTAKES[mistake]
    assert before in task.read_text()
    task.write_text(task.read_text().replace(before, after))
    model, words = model_and_words()
    with pytest.raises(InputError, match=said) as caught:
        hf.evaluate(model, [str(task)], tokenizer=words)
    assert "tiny_choice" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "task"])
def test_a_file_that_describes_no_task(task: Path, text: str) -> None:
    task.write_text(text)
    model, words = model_and_words()
    with pytest.raises(InputError, match=r"tiny_choice.yaml' describes no task"):
        hf.evaluate(model, [str(task)], tokenizer=words)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{not json", r"JSON parse error"),
        ("", r"no questions in its data file"),
        (json.dumps({**QUESTIONS[0], "answer": 7}), r"its first answer is none of its choices"),
        (
            json.dumps(QUESTIONS[0]) + "\n" + json.dumps({**QUESTIONS[1], "answer": 7}),
            r"question 2 .* answer 7",
        ),
    ],
)
def test_a_mistake_in_the_questions_is_one_sentence(task: Path, text: str, said: str) -> None:
    (task.parents[1] / "questions.jsonl").write_text(text)
    model, words = model_and_words()
    with pytest.raises(InputError, match=said):
        hf.evaluate(model, [str(task)], tokenizer=words)


def test_more_shots_than_there_are_examples(task: Path) -> None:
    model, words = model_and_words()
    with pytest.raises(InputError, match=r"tiny_choice.yaml' cannot be run: it has fewer examples than"):
        hf.evaluate(model, [str(task)], tokenizer=words, num_fewshot=100)


def test_the_errors_of_a_model_are_not_blamed_on_the_task(
    task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, words = model_and_words()

    def broken(*_: Any) -> None:
        raise KeyError("mine")

    monkeypatch.setattr(model, "forward", broken)
    with pytest.raises(KeyError, match="mine"):
        hf.evaluate(model, [str(task)], tokenizer=words)


def test_what_the_harness_stumbled_over_is_kept(task: Path) -> None:
    task.write_text(task.read_text().replace("test_split: test", "test_split: tst"))
    model, words = model_and_words()
    with pytest.raises(InputError) as caught:
        hf.evaluate(model, [str(task)], tokenizer=words)
    assert isinstance(caught.value.__cause__, KeyError)


def test_data_files_are_found_beside_the_task(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task.write_text(task.read_text().replace(str(tmp_path / "questions.jsonl"), "questions.jsonl"))
    (tmp_path / "questions.jsonl").rename(task.parent / "questions.jsonl")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    model, words = model_and_words()
    by_path = hf.evaluate(model, ["../tasks/tiny_choice.yaml"], tokenizer=words)
    by_name = hf.evaluate(model, ["tiny_choice"], tokenizer=words, include_path="../tasks")
    assert by_path == by_name
    assert Path.cwd() == tmp_path / "elsewhere"


def test_groups_and_files_of_one_name(task: Path) -> None:
    model, words = model_and_words()
    (task.parent / "tiny.yaml").write_text("group: tiny\ntask: [tiny_choice]\n")
    found = hf.evaluate(model, ["tiny"], tokenizer=words, include_path=task.parent)
    assert "acc" in found["tiny_choice"]
    other = task.with_name("other.yaml")
    other.write_text(task.read_text())
    with pytest.raises(InputError, match=r"both have a task 'tiny_choice'"):
        hf.evaluate(model, [str(task), str(other)], tokenizer=words)


def test_a_coupling_for_a_model_in_memory_is_refused(task: Path, tmp_path: Path) -> None:
    model, words = model_and_words()
    with pytest.raises(InputError, match=r"evaluated as it is: hf.load\(model, '.*nowhere'\) attaches"):
        hf.evaluate(model, [str(task)], tokenizer=words, coupling=tmp_path / "nowhere")


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_in_training_and_random_numbers_are_left_as_they_were(task: Path, fails: bool) -> None:
    model, words = model_and_words()
    model.train()
    model.model.layers[0].eval()  # as with a frozen layer
    modes = [module.training for module in model.modules()]

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    expected = draw()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    if fails:
        with pytest.raises(InputError):
            hf.evaluate(model, [str(task)], tokenizer=words, num_fewshot=100)
    else:
        hf.evaluate(model, [str(task)], tokenizer=words)
    assert draw() == expected
    assert [module.training for module in model.modules()] == modes


def test_scores_that_are_no_numbers_are_refused(task: Path) -> None:
    model, words = model_and_words()
    torch.nn.init.constant_(model.model.norm.weight, math.nan)
    with pytest.raises(InputError, match=r"log-likelihoods are not numbers"):
        hf.evaluate(model, [str(task)], tokenizer=words)
