"""Spans and masks, hub rows, and unknown tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from input_errors import raises_code
from qkflow.data.tasks import load, majority_mask, token_mask, word_spans
from task_examples import marked_texts

HubRows = dict[tuple[str, str | None], dict[str, list[dict[str, Any]]]]  # (name, config) -> split -> rows


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> HubRows:
    """Replace the hub by rows in memory."""
    datasets = pytest.importorskip("datasets")
    rows: HubRows = {}

    def load_dataset(
        name: str, config: str | None, revision: str | None, streaming: bool
    ) -> dict[str, list[dict[str, Any]]]:
        if (name, config) not in rows:
            raise FileNotFoundError(f"{name} is not there")
        return rows[name, config]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return rows


def test_hub_rows_give_the_same_examples(hub: HubRows) -> None:
    answers = {"text": ["oil"], "answer_start": [8]}
    row = {"id": "q", "question": "What?", "context": "In 1973 oil was dear.", "answers": answers}
    hub["rajpurkar/squad", None] = {"validation": [row]}
    hub["nyu-mll/glue", "rte"] = {"test": [{"sentence1": "A.", "sentence2": "B.", "label": -1, "idx": 0}]}
    post = {
        "id": "1",
        "annotators": {"label": [0, 2, 2]},
        "rationales": [[1, 0]],
        "post_tokens": ["bad", "dog"],
    }
    hub["someone/copy", None] = {"train": [post]}
    assert marked_texts(load("squad", "hf").examples[0]) == [["oil"]]
    assert load("rte", "hf", split="test").examples[0].text_pair == "B."
    example = load("hatexplain", "hf:someone/copy").examples[0]
    assert (example.label, marked_texts(example)) == ("offensive", [["bad"]])
    with raises_code("split-not-found"):
        load("squad", "hf", split="train")
    for source in ("hf:rajpurkar/squad:mb=5", "hf:rajpurkar/squad#question"):
        with raises_code("unsupported-hub-option"):
            load("squad", source)
    with raises_code("hub-dataset-failed") as raised:
        load("squad", "hf:nobody/nothing")
    assert "nobody/nothing" in str(raised.value)


def test_token_and_majority_masks() -> None:
    offsets = [(0, 3), (3, 5), (6, 9)]
    assert token_mask(offsets, [(4, 7)]) == [False, True, True]
    assert token_mask(offsets, []) == [False] * 3
    votes = [[(0, 3)], [(0, 5)], [(6, 9)]]
    assert majority_mask(offsets, votes) == [True, False, False]
    assert majority_mask(offsets, []) == [False] * 3
    assert word_spans("a  bc ") == [(0, 1), (3, 5)]


def test_unknown_task_and_missing_source(tmp_path: Path) -> None:
    with raises_code("unknown-task"):
        load("squadd", tmp_path)
    with raises_code("path-not-found"):
        load("squad", tmp_path / "nowhere")
