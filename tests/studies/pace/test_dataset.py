"""Encoded examples: rationales as token masks, held-out examples, issue counts, bad data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from input_errors import raises_code
from qkflow.data import tasks
from qkflow.data.tasks.examples import TaskDataset
from qkflow.errors import InputError
from qkflow.studies.pace import dataset
from qkflow.studies.pace.dataset import TaskData
from toy_task import load_task, write_hatexplain


def test_rationales_are_token_masks_and_test_examples_unseen(agreement: TaskData) -> None:
    assert agreement.classes == ["PL", "SG"]
    seen = {tuple(item.ids) for item in agreement.train if dataset.UNK_TOKEN_ID not in item.ids}
    assert not any(tuple(item.ids) in seen for item in agreement.test)
    assert all(sum(item.rationales[0]) == 1 for item in agreement.train), "the subject is one word"


def test_saved_data_round_trips(agreement: TaskData, tmp_path: Path) -> None:
    name = dataset.save_task_data(agreement, tmp_path)
    assert dataset.load_task_data(tmp_path, name) == agreement
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-9])
    with raises_code("corrupt-task-data"):
        dataset.load_task_data(tmp_path, name)
    with raises_code("unsafe-name"):
        dataset.load_task_data(tmp_path / "runs", f"../{name}")
    assert dataset.save_task_data(agreement, tmp_path) == name  # written again
    assert dataset.load_task_data(tmp_path, name) == agreement


def test_squad_rationale_covers_the_answer(squad: TaskData) -> None:
    item = squad.test[0]
    marked = [token for token, mark in zip(item.ids, item.rationales[0], strict=True) if mark]
    assert item.reference_answers[0] in "".join(squad.token_texts[token] for token in marked)
    assert item.answer_ids[-1] == squad.eos_token_id
    answer = "".join(squad.token_texts[token] for token in item.answer_ids[:-1])
    assert answer.strip() == item.reference_answers[0]
    assert len(squad.train) + len(squad.test) == 40


def test_unlabeled_test_split_raises(tmp_path: Path) -> None:
    folder = tmp_path / "SST-2"
    folder.mkdir()
    (folder / "train.tsv").write_text("sentence\tlabel\n" + "a good film\t1\na bad film\t0\n" * 5)
    (folder / "dev.tsv").write_text("sentence\nnobody said\n")
    with raises_code("no-labels"):
        load_task("sst-2", tmp_path)


def test_rationale_outside_the_text_raises(tmp_path: Path) -> None:
    rows = [{"text": "two words", "label": "normal", "rationale_token_spans": [[1, 3]]}]
    with raises_code("rationale-mismatch"):
        load_task("hatexplain", write_hatexplain(tmp_path, rows))


def test_examples_without_rationale_are_counted(tmp_path: Path) -> None:
    rows = [{"text": f"text {n}", "label": ("normal", "offensive")[n % 2]} for n in range(8)]
    more = [
        {"text": "other text", "label": "normal", "rationale_token_spans": []},
        {"text": "another text", "label": "offensive", "rationale_token_spans": [[0, 1]]},
    ]
    data = load_task("hatexplain", write_hatexplain(tmp_path, rows, more))
    assert data.issue_counts["test examples without a rationale"] == 1


def test_single_class_raises(tmp_path: Path) -> None:
    rows = [{"text": f"a b {n}", "label": "normal"} for n in range(4)]
    with raises_code("single-class"):
        load_task("hatexplain", write_hatexplain(tmp_path, rows, [{"text": "new", "label": "normal"}]))


def test_no_unseen_test_example_raises(tmp_path: Path) -> None:
    rows = [{"text": f"text {n}", "label": ("normal", "offensive")[n % 2]} for n in range(4)]
    with raises_code("no-test-examples"):
        load_task("hatexplain", write_hatexplain(tmp_path, rows))


def test_source_without_validation_split_holds_out_test_examples(tmp_path: Path) -> None:
    rows = [{"text": f"text {n}", "label": ("normal", "offensive")[n % 2]} for n in range(40)]
    folder = write_hatexplain(tmp_path, rows)
    (folder / "val.jsonl").unlink()
    data = load_task("hatexplain", folder)
    assert (len(data.train), len(data.test)) == (36, 4)


def test_undivided_source_holds_out_test_examples(tmp_path: Path) -> None:
    posts = {}
    for n in range(40):
        annotators = [{"label": ("normal", "offensive")[n % 2]}] * 3
        posts[str(n)] = {"post_tokens": ["post", str(n)], "annotators": annotators, "rationales": []}
    (tmp_path / "dataset.json").write_text(json.dumps(posts))
    data = load_task("hatexplain", tmp_path)
    assert (len(data.train), len(data.test)) == (36, 4)
    assert not {item.name for item in data.train} & {item.name for item in data.test}


def test_errors_other_than_a_missing_split_are_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> TaskDataset:
        raise InputError("no such thing", code="broken-file")

    monkeypatch.setattr(tasks, "load", fail)
    with raises_code("broken-file"):
        load_task("hatexplain", tmp_path)
