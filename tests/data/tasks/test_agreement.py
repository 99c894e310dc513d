"""Agreement: Linzen's file, prefixes, and generated sentences."""

from __future__ import annotations

from pathlib import Path

import pytest

from input_errors import raises_code
from qkflow.data.tasks import load
from task_examples import marked_texts

LINZEN = [
    "sentence",
    "orig_sentence",
    "pos_sentence",
    "subj",
    "verb",
    "verb_pos",
    "subj_index",
    "verb_index",
    "n_diff_intervening",
]


def linzen_file(folder: Path, *rows: dict[str, object]) -> Path:
    path = folder / "agr_50_mostcommon_10K.tsv"
    lines = [LINZEN, *([str(row.get(name, "x")) for name in LINZEN] for row in rows)]
    path.write_text("\n".join("\t".join(line) for line in lines))
    return path


ROW = {
    "orig_sentence": "the key to the cabinets is on the table .",
    "verb_pos": "VBZ",
    "subj_index": 2,
    "verb_index": 6,
    "n_diff_intervening": 1,
}


def test_linzen_text_ends_before_the_verb(tmp_path: Path) -> None:
    linzen_file(tmp_path, ROW, ROW | {"verb_pos": "VBP", "verb_index": 1, "subj_index": 5})
    dataset = load("agreement", tmp_path)
    (example,) = dataset.examples
    assert example.text == "the key to the cabinets"
    assert (example.label, marked_texts(example)) == ("SG", [["key"]])
    assert example.metadata == {"verb": "is", "attractors": 1}
    assert dataset.issue_counts == {"sentences dropped: the subject follows the verb": 1}


def test_linzen_as_published_includes_the_verb(tmp_path: Path) -> None:
    (example,) = load("agreement", linzen_file(tmp_path, ROW), as_published=True).examples
    assert example.text == ROW["orig_sentence"]
    assert marked_texts(example) == [["key", "is"]]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"subj_index": 40}, "word-index-out-of-range"),
        ({"verb_pos": "NN"}, "invalid-verb-tag"),
        ({"verb_index": "x"}, "not-a-number"),
    ],
)
def test_invalid_linzen_rows(tmp_path: Path, change: dict[str, object], code: str) -> None:
    with raises_code(code) as raised:
        load("agreement", linzen_file(tmp_path, ROW | change))
    assert "10K.tsv:2" in str(raised.value)


def test_prefix_file(tmp_path: Path) -> None:
    path = tmp_path / "prefixes.tsv"
    path.write_text('SG\tis\tThe key to the "cabinets"\nPL\tare\t1\t0\tsource.txt\tThe keys\n')
    dataset = load("agreement", path)
    assert [(example.text, example.label) for example in dataset.examples] == [
        ('The key to the "cabinets"', "SG"),
        ("The keys", "PL"),
    ]
    assert dataset.examples[1].rationales == ()
    path.write_text("SG\tis\tThe key\nSG\tis\n")
    with raises_code("invalid-agreement-line") as raised:
        load("agreement", path)
    assert "prefixes.tsv:2" in str(raised.value)
    path.write_text("a\tb\n")
    with raises_code("unknown-agreement-layout"):
        load("agreement", path)


def test_generated_full_sentences_mark_the_verb() -> None:
    for example in load("agreement", "generate", as_published=True, limit=50).examples:
        assert marked_texts(example) == [[example.metadata["subject"], example.metadata["verb"]]]
        assert example.text.split()[example.metadata["verb_index"]] == example.metadata["verb"]


def test_limit_and_missing_file(tmp_path: Path) -> None:
    assert len(load("agreement", linzen_file(tmp_path, ROW, ROW, ROW), limit=2).examples) == 2
    (tmp_path / "empty").mkdir()
    with raises_code("no-agreement-file"):
        load("agreement", tmp_path / "empty")
