"""Splits: by the names of files and of hub splits, or by a stable hash of the text."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from input_errors import raises_code
from qkflow.data import splits


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("train.md", "train"),
        ("Train_1.jsonl.gz", "train"),
        ("data/dev/a.txt", "validation"),
        ("ptb.valid.txt", "validation"),
        ("train-00000-of-00002.parquet", "train"),
        ("test-00000-of-00001-a09b74b3ef9c3b56.parquet", "test"),
        ("train-a-model.md", None),
        ("testing ground/a.txt", None),
    ],
)
def test_split_from_path(path: str, split: str | None) -> None:
    assert splits.split_from_path(path) == split


@given(
    st.lists(st.text(min_size=1, max_size=5), min_size=2, max_size=80).filter(
        lambda texts: len(set(texts)) > 1
    )
)
@settings(max_examples=100, deadline=None)
def test_small_corpora_have_train_and_validation(texts: list[str]) -> None:
    divided = list(splits.assign_splits([(splits.UNSPLIT, text) for text in texts], "x"))
    assert [document.text.encode(errors="replace") for document in divided if document.text.isascii()] == [
        text.encode() for text in texts if text.isascii()
    ]
    assert {"train", "validation"} <= {document.split for document in divided}
    assert len({document.split for document in divided if document.text == divided[0].text}) == 1
    assert all(document.n_bytes == len(document.text.encode()) for document in divided)


def test_hash_fractions_and_independence_of_order() -> None:
    texts = [f"document {number}" for number in range(20_000)]
    divided = list(splits.assign_splits([(splits.UNSPLIT, text) for text in texts], "x"))
    counts = Counter(document.split for document in divided)
    assert counts["validation"] == pytest.approx(1000, rel=0.1)
    assert counts["test"] == pytest.approx(1000, rel=0.1)
    shuffled = {
        d.text: d.split
        for d in splits.assign_splits([(splits.UNSPLIT, t) for t in reversed(texts[40:])], "x")
    }
    alike = [shuffled[document.text] == document.split for document in divided[40:]]
    assert sum(alike) >= len(alike) - 1  # all but one that may have been forced into validation


def test_own_splits_are_kept_and_validation_comes_from_train() -> None:
    documents = [(splits.UNSPLIT_TRAIN, f"train {i}") for i in range(1000)] + [
        ("test", f"test {i}") for i in range(9)
    ]
    counts = Counter(document.split for document in splits.assign_splits(documents, "x"))
    assert counts["test"] == 9
    assert counts["validation"] == pytest.approx(50, abs=25)
    assert splits.map_source_splits(["train", "validation"]) == {"train": "train", "validation": "validation"}
    assert splits.map_source_splits(["test"]) == {}


def test_single_document_cannot_be_split() -> None:
    for times in (1, splits.LOOKAHEAD_DOCUMENTS, 3 * splits.LOOKAHEAD_DOCUMENTS):
        with raises_code("single-document"):
            list(splits.assign_splits([(splits.UNSPLIT, "all there is")] * times, "x"))


@pytest.mark.parametrize("others", [1, 200])
def test_duplicates_at_the_start_are_not_a_single_document(others: int) -> None:
    texts = ["(none)"] * (splits.LOOKAHEAD_DOCUMENTS + 5) + [f"document {number}" for number in range(others)]
    divided = list(splits.assign_splits([(splits.UNSPLIT, text) for text in texts], "x"))
    assert [document.text for document in divided] == texts
    assert {"train", "validation"} <= {document.split for document in divided}
    assert len({document.split for document in divided if document.text == "(none)"}) == 1
    assert others == 1 or divided[0].split == "train"  # by its hash: none was forced


def test_lone_surrogate_becomes_replacement_character() -> None:
    first, _ = splits.assign_splits([(splits.UNSPLIT, "bad \ud800 end"), (splits.UNSPLIT, "good")], "x")
    assert first.text == "bad \ufffd end"
