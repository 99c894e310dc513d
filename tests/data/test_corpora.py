"""Corpora: names, paths, folders with splits, and errors."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from input_errors import raises_code
from qkflow.data import corpora, splits
from qkflow.data.readers.files import ReadProgress
from qkflow.data.readers.hf_datasets import parse_spec
from qkflow.data.synthetic import parse_options


def read_documents(name: object) -> list[tuple[str, str]]:
    return list(corpora.resolve(str(name)).iter_documents(ReadProgress()))


def test_speeches_need_no_pandas_or_torch() -> None:
    code = (
        "import sys; from qkflow.data import corpora; from qkflow.data.readers.files import ReadProgress;"
        "documents = list(corpora.resolve('speeches').iter_documents(ReadProgress()));"
        "print(len(documents), sum(len(text.encode()) for _, text in documents),"
        "'pandas' in sys.modules, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    documents, size, pandas, torch = result.stdout.split()
    assert int(documents) == 249
    assert 12_000_000 < int(size) < 12_300_000
    assert (pandas, torch) == ("False", "False")


def test_globs_do_not_follow_links(tmp_path: Path) -> None:
    """Links of a folder to itself would be followed 40 times: 2^40 paths."""
    (tmp_path / "sub").mkdir()
    for name in ("a.txt", "sub/b.txt", ".hidden.txt"):
        (tmp_path / name).write_text(f"text of {name}\n")
    for name in ("first", "second"):
        (tmp_path / name).symlink_to(".")
    for pattern in ("**/*.txt", "**"):
        assert [text for _, text in read_documents(tmp_path / pattern)] == [
            "text of a.txt\n",
            "text of sub/b.txt\n",
        ]
    assert len(read_documents(tmp_path / ".*.txt")) == 1
    with raises_code("corpus-not-found"):
        read_documents(tmp_path / "a**")


def test_python_corpus_excludes_tests_and_packages() -> None:
    corpus = corpora.resolve("python")
    assert isinstance(corpus, corpora.FileCorpus)
    names = {str(file.path) for file in corpus.files}
    assert any(name.endswith("json/decoder.py") for name in names)
    assert not any("site-packages" in name or "/test/" in name for name in names)
    assert corpus.metadata["python"] == ".".join(map(str, sys.version_info[:3]))


def test_folder_splits_from_file_names(tmp_path: Path) -> None:
    for name in ("train-0.txt", "train-1.txt", "dev.txt", "test.txt", "notes.txt", "README.md"):
        (tmp_path / name).write_text(f"text of {name}\n")
    corpus = corpora.resolve(str(tmp_path))
    assert Counter(split for split, _ in corpus.iter_documents(ReadProgress())) == {
        "train": 2,
        "validation": 1,
        "test": 1,
    }
    assert corpus.metadata["left_out"] == [str(tmp_path / "notes.txt")]
    # A glob selects its files: none is left out.
    assert {split for split, _ in read_documents(tmp_path / "*.txt")} == {splits.UNSPLIT}
    assert {split for split, _ in read_documents(tmp_path / "t*.txt")} == {splits.UNSPLIT_TRAIN, "test"}
    assert {split for split, _ in read_documents(tmp_path / "train*")} == {splits.UNSPLIT}


@pytest.mark.parametrize(
    "names", [["imdb-train.csv", "imdb-test.csv"], ["data/train/a.txt", "data/test/a.txt", "b.txt"]]
)
def test_split_words_count_in_all_names_or_as_whole_name(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text\n{name}\n")
    corpus = corpora.resolve(str(tmp_path))
    assert [split for split, _ in corpus.iter_documents(ReadProgress())] == ["test", splits.UNSPLIT_TRAIN]
    assert corpus.metadata["left_out"] == [str(tmp_path / name) for name in names[2:]]


def test_split_word_inside_a_title_is_ignored(tmp_path: Path) -> None:
    names = ["train a model.md", "train-2-models.md", "dev-setup.md", "how to test.md", "page.md"]
    for name in names:
        (tmp_path / name).write_text(f"text of {name}\n")
    corpus = corpora.resolve(str(tmp_path))
    assert [split for split, _ in corpus.iter_documents(ReadProgress())] == [splits.UNSPLIT] * len(names)
    assert corpus.metadata["left_out"] == []


def test_folder_reads_one_format_recursively_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "deep" / ".git").mkdir(parents=True)
    (tmp_path / "deep" / ".git" / "x.jsonl").write_text('{"text": "hidden"}\n')
    (tmp_path / "deep" / "a.jsonl").write_text('{"text": "seen"}\n')
    (tmp_path / "about.txt").write_text("about\n")
    assert read_documents(tmp_path) == [(splits.UNSPLIT, "seen")]
    assert corpora.resolve(str(tmp_path)).metadata["left_out"] == [str(tmp_path / "about.txt")]


def test_document_per_file_from_min_files_on(tmp_path: Path) -> None:
    for number in range(corpora.MIN_FILES_UNSPLIT):
        (tmp_path / f"{number}.txt").write_text(f"{number}\n\n" * 1000)
    assert len(read_documents(tmp_path)) == corpora.MIN_FILES_UNSPLIT
    (tmp_path / "0.txt").unlink()
    assert len(read_documents(tmp_path)) > 2 * corpora.MIN_FILES_UNSPLIT


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("speches", "unknown-corpus"),
        ("./none.txt", "corpus-not-found"),
        ("none/*.txt", "corpus-not-found"),
        ("speeches:x=1", "corpus-without-options"),
        ("patterns:repeet=1", "unknown-option"),
        ("patterns:repeat=2", "above-maximum"),
        ("patterns:vocabulary=100", "renamed-option"),
        ("patterns:seed=x", "not-a-number"),
        ("patterns:documents=1", "below-minimum"),
        ("hf:", "missing-dataset-name"),
        ("c4:mb=many", "not-a-number"),
        ("c4:gb=1", "unknown-option"),
    ],
)
def test_invalid_corpus_names(name: str, code: str) -> None:
    with raises_code(code):
        corpora.resolve(name)


def test_folder_without_text_files(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    with raises_code("no-text-files"):
        corpora.resolve(str(tmp_path))


def test_cache_keys_survive_renamed_options() -> None:
    """Stamps keep the option names of older versions, so that their caches stay valid."""
    synthetic = corpora.SyntheticCorpus("patterns", parse_options("patterns", "vocab_size=100,seed=3"))
    assert ("vocabulary", 100) in synthetic.stamp()
    hub = corpora.HubCorpus("hf:owner/name", parse_spec("owner/name:config:mb=5"))
    assert hub.stamp()[2:-1] == [
        ("repository", "owner/name"),
        ("revision", None),
        ("config", "config"),
        ("column", None),
        ("megabytes", 5),
    ]
