"""HateXplain: both layouts, majority labels, rationales, splits and invalid posts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from input_errors import raises_code
from qkflow.data.tasks import load
from task_examples import marked_texts


def hatexplain_folder(
    folder: Path, posts: dict[str, Any], divisions: dict[str, list[str]] | None = None
) -> Path:
    (folder / "dataset.json").write_text(json.dumps(posts))
    if divisions is not None:
        (folder / "post_id_divisions.json").write_text(json.dumps(divisions))
    return folder


def post(labels: list[str], masks: list[list[int]], tokens: str = "you are a bad dog") -> dict[str, Any]:
    annotators = [{"label": label, "annotator_id": i, "target": ["None"]} for i, label in enumerate(labels)]
    return {"post_tokens": tokens.split(), "annotators": annotators, "rationales": masks}


def test_original_layout(tmp_path: Path) -> None:
    posts = {
        "1_twitter": post(["offensive", "hatespeech", "offensive"], [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]),
        "2_gab": post(["normal", "normal", "offensive"], []),
        "3_gab": post(["normal", "hatespeech", "offensive"], [[1, 0, 0, 0, 0]]),
        "4_gab": post(["normal", "normal", "normal"], []),
    }
    divisions = {"train": ["1_twitter", "2_gab", "3_gab"], "val": [], "test": ["4_gab"]}
    dataset = load("hatexplain", hatexplain_folder(tmp_path, posts, divisions), split="train")
    assert [(example.name, example.label) for example in dataset.examples] == [
        ("1_twitter", "offensive"),
        ("2_gab", "normal"),
    ]
    assert marked_texts(dataset.examples[0]) == [["a bad"], ["bad dog"]]
    assert dataset.examples[0].metadata["annotators"] == 3
    assert dataset.issue_counts == {"undecided posts dropped": 1, "posts without a rationale": 1}
    assert [example.name for example in load("hatexplain", tmp_path, split="test").examples] == ["4_gab"]


def test_rationale_of_wrong_length(tmp_path: Path) -> None:
    posts = {"77_gab": post(["offensive"] * 3, [[0, 1]])}
    with raises_code("rationale-mismatch") as raised:
        load("hatexplain", hatexplain_folder(tmp_path, posts, {"train": ["77_gab"]}))
    assert "post 77_gab" in str(raised.value)


def test_jsonl_layout(tmp_path: Path) -> None:
    lines = [
        {"text": "you are  a bad dog", "label": "offensive", "rationale_token_spans": [[0, 1], [3, 5]]},
        {"text": "hello", "label": "normal"},
    ]
    (tmp_path / "val.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    dataset = load("hatexplain", tmp_path, split="validation")
    assert marked_texts(dataset.examples[0]) == [["you", "bad dog"]]
    assert dataset.examples[1].rationales == ()
    assert dataset.issue_counts == {"posts without a rationale": 1}


@pytest.mark.parametrize(
    ("line", "code", "value"),
    [
        (
            {"text": "a b", "label": "offensive", "post_id": "9", "rationale_token_spans": [[1, 3]]},
            "rationale-mismatch",
            "post 9",
        ),
        (
            {"text": "a b", "label": "offensive", "rationale_token_spans": [[1]]},
            "rationale-mismatch",
            "2 tokens",
        ),
        ({"text": "a b"}, "invalid-label", "train.jsonl:1"),
        ({"label": "normal"}, "no-text", "train.jsonl:1"),
    ],
)
def test_invalid_jsonl_posts(tmp_path: Path, line: dict[str, Any], code: str, value: str) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps(line))
    with raises_code(code) as raised:
        load("hatexplain", tmp_path)
    assert value in str(raised.value)


def test_dataset_without_divisions_is_undivided(tmp_path: Path) -> None:
    posts = {"1_gab": post(["normal"] * 3, []), "2_gab": post(["offensive"] * 3, [[0, 0, 0, 1, 0]])}
    hatexplain_folder(tmp_path, posts)
    for split in ("train", "validation"):
        dataset = load("hatexplain", tmp_path, split=split)
        assert dataset.undivided
        assert [example.name for example in dataset.examples] == ["1_gab", "2_gab"]
    hatexplain_folder(tmp_path, posts, {"train": ["1_gab"]})
    assert not load("hatexplain", tmp_path).undivided


def test_missing_splits(tmp_path: Path) -> None:
    hatexplain_folder(tmp_path, {"1_gab": post(["normal"] * 3, [])}, {"train": ["1_gab"]})
    with raises_code("split-not-found"):
        load("hatexplain", tmp_path, split="validation")
    (tmp_path / "dataset.json").rename(tmp_path / "train.jsonl")
    with raises_code("split-not-found"):
        load("hatexplain", tmp_path, split="test")
    with raises_code("unknown-split"):
        load("hatexplain", tmp_path, split="rest")
