from __future__ import annotations

from pathlib import Path

import pytest

from input_errors import raises_code
from qkflow.data.tasks.examples import Example
from qkflow.data.tokenizer import ByteTokenizer
from qkflow.studies.finetune.config import parse_tasks
from qkflow.studies.finetune.dataset import encode_example, encode_task, load_task

END = ByteTokenizer.eos_token_id
(SST2,) = parse_tasks(["glue:SST-2"])


def encode(text: str, pair: str | None = None, max_length: int = 20) -> tuple[list[int | str], bool]:
    ids, is_truncated = encode_example(Example("x", text, "0", pair), ByteTokenizer(), max_length)
    return ["|" if token == END else chr(token) for token in ids], is_truncated


def test_texts_are_enclosed_in_end_of_text_tokens() -> None:
    assert encode("ab") == (list("|ab|"), False)
    assert encode("ab", "cd") == (list("|ab|cd|"), False)
    assert encode("") == (list("||"), False)


def test_the_longest_text_is_truncated() -> None:
    assert encode("abcdef", max_length=5) == (list("|abc|"), True)
    assert encode("abcdef", "gh", max_length=8) == (list("|abc|gh|"), True)
    assert encode("a", "ghijkl", max_length=8) == (list("|a|ghij|"), True)
    assert len(encode("abc", "def", max_length=2)[0]) == 2


def test_encoded_task(glue_folder: Path) -> None:
    data = encode_task(load_task(SST2, str(glue_folder)), ByteTokenizer(), 12)
    assert (len(data.train), len(data.test), data.classes) == (96, 40, ["0", "1"])
    assert {example.label for example in data.train} == {0, 1}
    assert all(example.ids[0] == example.ids[-1] == END for example in data.test)
    assert 0 < data.issue_counts["examples truncated"] <= 136


def test_limit_takes_a_fixed_random_subset(glue_folder: Path) -> None:
    whole = load_task(SST2, str(glue_folder))
    part = load_task(SST2, str(glue_folder), 10)
    assert len(part.train) == 10
    assert part == load_task(SST2, str(glue_folder), 10)
    assert part.train != whole.train[:10]
    assert part.validation == whole.validation


@pytest.mark.parametrize(
    ("train", "dev", "code"),
    [
        ("sentence\tlabel\na\t1\nb\t0\n", None, "split-not-found"),
        ("sentence\tlabel\na\t1\nb\t1\n", "sentence\tlabel\na\t1\n", "single-class"),
        ("sentence\tlabel\na\t1\nb\t0\n", "index\tsentence\n0\ta\n", "no-labels"),
        ("sentence\tlabel\na\t7\n", "sentence\tlabel\na\t1\n", "invalid-label"),
        ("text\na\n", "sentence\tlabel\na\t1\n", "unknown-glue-layout"),
    ],
)
def test_bad_files(train: str, dev: str | None, code: str, tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text(train)
    if dev is not None:
        (tmp_path / "dev.tsv").write_text(dev)
    with raises_code(code):
        load_task(SST2, str(tmp_path))
