"""Preparing a corpus: cached by content, whole or not at all, rebuilt if corrupt."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from corpus_files import write_corpus
from input_errors import raises_code
from qkflow.data import pipeline, prepare, verify
from qkflow.data.bpe_cache import use_bpe_cache
from qkflow.data.token_set import MANIFEST_NAME


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QKFLOW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A corpus of 400 documents, old enough for the index."""
    return write_corpus(tmp_path / "corpus.jsonl", 400)


def token_sets(cache: Path) -> list[Path]:
    return sorted((cache / "sets").glob("*"))


def test_second_prepare_reads_only_the_index(corpus: Path, cache: Path) -> None:
    first = prepare(str(corpus), "bytes")
    made = (first.folder / MANIFEST_NAME).stat().st_mtime_ns
    # Other content of the same size and time: reading it would change the fingerprint.
    corpus.write_text("x" * corpus.stat().st_size)
    os.utime(corpus, (1e9, 1e9))
    second = prepare(str(corpus), "bytes")
    assert (second.fingerprint, second.folder) == (first.fingerprint, first.folder)
    assert (second.folder / MANIFEST_NAME).stat().st_mtime_ns == made


def test_cached_prepare_imports_nothing_heavy(corpus: Path) -> None:
    prepare(str(corpus), "bpe:300")
    code = (
        f"import sys; from qkflow.data import prepare; tokens = prepare({str(corpus)!r}, 'bpe:300');"
        "tokens.tokens('train')[:5];"
        "heavy = {'torch', 'tokenizers', 'datasets', 'pandas', 'pyarrow', 'filelock', 'rich', 'scipy'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_cache_key_is_the_content(corpus: Path, tmp_path: Path, cache: Path) -> None:
    first = prepare(str(corpus), "bytes")
    copy = tmp_path / "elsewhere.jsonl"
    copy.write_bytes(corpus.read_bytes())
    again = prepare(str(copy), "bytes")
    assert again.folder == first.folder
    assert again.name == str(copy)
    write_corpus(corpus, 401)
    assert prepare(str(corpus), "bytes").fingerprint != first.fingerprint
    assert len(token_sets(cache)) == 2


def test_recent_files_are_not_indexed(corpus: Path, cache: Path) -> None:
    os.utime(corpus)
    prepare(str(corpus), "bytes")
    assert not list((cache / "index").glob("*"))


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest", "format"])
def test_corrupt_token_set_is_rebuilt(corpus: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    first = prepare(str(corpus), "bpe:300")
    victim = first.folder / ("manifest.json" if damage in ("manifest", "format") else "validation.tokens.bin")
    content = bytearray(victim.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    elif damage == "truncate":
        content = content[:-2]
    elif damage == "manifest":
        content = content[: len(content) // 2]
    elif damage == "format":
        content = content.replace(b'"bytes": ', b'"bytes": 1', 1)
    if damage == "remove":
        victim.unlink()
    else:
        victim.write_bytes(content)
    again = prepare(str(corpus), "bpe:300")
    assert str(victim) in capsys.readouterr().err
    assert again.fingerprint == first.fingerprint
    assert verify(str(corpus), "bpe:300")[1] == []


def test_verify_checks_unsampled_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    big = write_corpus(tmp_path / "big.jsonl", 3000)
    first = prepare(str(big), "bytes")
    victim = first.folder / "train.tokens.bin"
    assert victim.stat().st_size > 1_000_000
    with open(victim, "r+b") as file:
        file.seek(victim.stat().st_size // 62)  # between the first sampled block and the second
        file.write(b"!")
    assert prepare(str(big), "bytes").folder == first.folder
    assert capsys.readouterr().err == ""
    tokens, corrupted = verify(str(big), "bytes")
    assert [str(victim) in message for message in corrupted] == [True]
    assert tokens.fingerprint == first.fingerprint
    assert verify(str(big), "bytes")[1] == []


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ('{"text": " "}\n', "no-text"),
        ('{"text": "one"}\n', "single-document"),
    ],
)
def test_too_little_text_leaves_no_files(tmp_path: Path, cache: Path, content: str, code: str) -> None:
    (tmp_path / "small.jsonl").write_text(content)
    with raises_code(code):
        prepare(str(tmp_path / "small.jsonl"), "bytes")
    assert not token_sets(cache)
    assert list((cache / "staging").glob("*")) == []


def test_corpus_that_changes_while_read(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenize_corpus = pipeline.tokenize_corpus

    def tokenize_and_change(*arguments: object) -> None:
        tokenize_corpus(*arguments)  # type: ignore[arg-type]
        write_corpus(corpus, 5, seed=1)

    monkeypatch.setattr(pipeline, "tokenize_corpus", tokenize_and_change)
    with raises_code("corpus-changed"):
        prepare(str(corpus), "bytes")


def test_own_splits_are_kept(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    for number, split in enumerate(("train", "valid", "test")):
        write_corpus(tmp_path / "own" / f"{split}.jsonl", 10 + number, seed=number)
    counts = prepare(str(tmp_path / "own"), "bytes").describe()["splits"]
    assert [counts[split]["documents"] for split in ("train", "validation", "test")] == [10, 11, 12]


def test_tokenizer_training_bytes_are_limited(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkflow.data.pipeline.MAX_TOKENIZER_TRAIN_BYTES", 20_000)
    monkeypatch.setattr("qkflow.data.pipeline.BATCH_BYTES", 10_000)
    tokens = prepare(str(corpus), "bpe:300")
    trained_on = tokens.describe()["corpus"]["tokenizer_trained_on_bytes"]
    assert 10_000 < trained_on < 40_000
    whole = prepare("patterns:documents=400,words=100", "bpe:300")
    assert whole.n_bytes("train") == tokens.n_bytes("train") > 4 * trained_on


@pytest.mark.parametrize("tokenizer", ["bpe:300", "bytes"])
def test_token_set_does_not_depend_on_the_bpe_cache(corpus: Path, tmp_path: Path, tokenizer: str) -> None:
    fingerprints = set()
    for enabled in (True, False):
        with use_bpe_cache(enabled):
            tokens = prepare(str(corpus), tokenizer, cache_dir=tmp_path / str(enabled))
        fingerprints.add(tokens.fingerprint)
    assert len(fingerprints) == 1
