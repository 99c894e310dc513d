"""SQuAD: answers located, repaired and counted; windows; layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from input_errors import raises_code
from qkflow.data.tasks import load
from task_examples import marked_texts

CONTEXT = "In 1973 oil was dear. The crisis began in October 1973 and ended in 1974."


def squad_file(folder: Path, *questions: dict[str, Any]) -> Path:
    path = folder / "dev-v2.0.json"
    paragraph = {"context": CONTEXT, "qas": list(questions)}
    path.write_text(json.dumps({"version": "v2.0", "data": [{"title": "t", "paragraphs": [paragraph]}]}))
    return path


def question_row(
    identifier: str, *answers: tuple[str, int], impossible: bool | None = None
) -> dict[str, Any]:
    question = {"id": identifier, "question": "When?"}
    question["answers"] = [{"text": text, "answer_start": start} for text, start in answers]
    return question | ({} if impossible is None else {"is_impossible": impossible})


def test_answers_at_their_offsets(tmp_path: Path) -> None:
    start = CONTEXT.index("October 1973")
    squad_file(
        tmp_path,
        question_row("a", ("October 1973", start), ("October", start)),
        question_row("b", impossible=True),
    )
    dataset = load("squad", tmp_path)
    (example,) = dataset.examples
    assert example.text == f"Q: When? C: {CONTEXT} A:"
    assert example.label == "October 1973"
    assert marked_texts(example) == [["October 1973"]]
    assert example.metadata["answers"] == ["October 1973", "October"]
    assert dataset.issue_counts == {"impossible questions dropped": 1}
    kept = load("squad", tmp_path, keep_impossible=True)
    assert [each.label for each in kept.examples] == ["October 1973", ""]


def test_wrong_offsets_are_repaired_and_counted(tmp_path: Path) -> None:
    near = CONTEXT.index("1973 and") + 2  # off by two from the second 1973
    squad_file(
        tmp_path,
        question_row("near", ("1973", near)),
        question_row("past", ("1974", 10_000)),
        question_row("none", ("1975", 3)),
    )
    dataset = load("squad", tmp_path / "dev-v2.0.json")
    starts = [each.rationales[0][0][0] - len("Q: When? C: ") for each in dataset.examples]
    assert starts == [CONTEXT.index("1973 and"), CONTEXT.index("1974")]
    assert dataset.issue_counts["answers found at another offset"] == 2
    assert dataset.issue_counts["answers dropped: not in the context"] == 1
    assert dataset.issue_counts["questions dropped: no answer is in the context"] == 1


def test_relocate_moves_answers_to_where_annotators_agree(tmp_path: Path) -> None:
    start = CONTEXT.index("October 1973")
    path = squad_file(tmp_path, question_row("a", ("1973", CONTEXT.index("1973")), ("October 1973", start)))
    given, moved = load("squad", path), load("squad", path, relocate=True)
    assert given.examples[0].rationales[0][0][0] < moved.examples[0].rationales[0][0][0]
    assert marked_texts(moved.examples[0]) == [["1973"]]
    assert moved.issue_counts == {"answers moved to where annotators agree": 1}


def test_window_keeps_the_answer_span(tmp_path: Path) -> None:
    path = squad_file(tmp_path, question_row("a", ("October 1973", CONTEXT.index("October 1973"))))
    (example,) = load("squad", path, window=6).examples
    assert example.text == "Q: When? C: an in October 1973 and e A:"
    assert marked_texts(example) == [["October 1973"]]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("{}", "unknown-squad-layout"),
        ("[1]", "unknown-squad-layout"),
        ('{"data": [{"paragraphs": [{}]}]}', "unknown-squad-layout"),
        ("not json", "invalid-json"),
    ],
)
def test_unknown_layouts(tmp_path: Path, content: str, code: str) -> None:
    (tmp_path / "dev-v1.1.json").write_text(content)
    with raises_code(code) as raised:
        load("squad", tmp_path)
    assert "dev-v1.1.json" in str(raised.value)


def test_missing_splits(tmp_path: Path) -> None:
    with raises_code("split-not-found"):
        load("squad", squad_file(tmp_path).parent, split="train")
    with raises_code("split-not-found"):
        load("squad", tmp_path, split="test")
