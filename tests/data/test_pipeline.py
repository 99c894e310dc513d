"""Preparing: once, whole or not at all, found again at once, and never trusted when damaged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers

from qkflow.data import prepare, synthetic, verify
from qkflow.data.token_set import MANIFEST_NAME, open_token_set
from qkflow.errors import InputError

CHILD = """
import sys
from qkflow.cli.main import main
main()
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QKFLOW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A text of 400 documents, old enough to be remembered by its time."""
    return write(tmp_path / "corpus.jsonl", 400)


def write(path: Path, documents: int, seed: int = 0) -> Path:
    texts = synthetic.parse_options(f"documents={documents},words=100,seed={seed}").generate_documents()
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    os.utime(path, (1e9, 1e9 + seed))
    return path


def start(*arguments: str | Path, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, "data", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )


def sets(cache: Path) -> list[Path]:
    return sorted((cache / "sets").glob("*"))


def test_a_prepared_set_holds_the_text(corpus: Path) -> None:
    tokens = prepare(str(corpus), "bpe:300")
    texts = {json.loads(line)["text"] for line in corpus.read_text().splitlines()}
    found: set[str] = set()
    for split in ("train", "validation", "test"):
        stream, ends = tokens.tokens(split), tokens.document_offsets(split)
        assert ends[0] == 0
        assert ends[-1] == len(stream)
        assert np.all(stream[ends[1:] - 1] == tokens.eos_token_id)
        documents = {tokens.tokenizer.decode(stream[a:b]) for a, b in pairwise(ends)}
        assert sum(len(text.encode()) for text in documents) == tokens.n_bytes(split)
        assert tokens.token_bytes[stream].sum() == tokens.n_bytes(split)
        assert not found & documents
        found |= documents
    assert found == texts
    assert tokens.vocab_size == 300
    assert tokens.tokens("valid").dtype == np.uint16
    described = tokens.describe()
    assert described["splits"]["train"]["documents"] > 300
    assert json.loads(json.dumps(described)) == described
    with pytest.raises(ValueError, match="read-only"):
        tokens.tokens("train")[0] = 1


def test_the_second_time_nothing_is_read(corpus: Path, cache: Path) -> None:
    first = prepare(str(corpus), "bytes")
    made = (first.folder / MANIFEST_NAME).stat().st_mtime_ns
    # were the source opened again, this would be noticed: same size and time, other content
    corpus.write_text("x" * corpus.stat().st_size)
    os.utime(corpus, (1e9, 1e9))
    second = prepare(str(corpus), "bytes")
    assert (second.fingerprint, second.folder) == (first.fingerprint, first.folder)
    assert (second.folder / MANIFEST_NAME).stat().st_mtime_ns == made


def test_opening_needs_nothing_heavy(corpus: Path) -> None:
    prepare(str(corpus), "bpe:300")
    code = (
        f"import sys; from qkflow.data import prepare; tokens = prepare({str(corpus)!r}, 'bpe:300');"
        "tokens.tokens('train')[:5];"
        "heavy = {'torch', 'tokenizers', 'datasets', 'pandas', 'pyarrow', 'filelock', 'rich', 'scipy'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_content_decides_not_place_or_time(corpus: Path, tmp_path: Path, cache: Path) -> None:
    first = prepare(str(corpus), "bytes")
    copy = tmp_path / "elsewhere.jsonl"
    copy.write_bytes(corpus.read_bytes())
    again = prepare(str(copy), "bytes")
    assert again.folder == first.folder
    assert again.name == str(copy)
    write(corpus, 401)
    assert prepare(str(corpus), "bytes").fingerprint != first.fingerprint
    assert len(sets(cache)) == 2


def test_a_young_file_is_read_again_rather_than_trusted_by_its_time(corpus: Path, cache: Path) -> None:
    os.utime(corpus)
    prepare(str(corpus), "bytes")
    assert not list((cache / "index").glob("*"))


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove", "manifest", "format"])
def test_a_damaged_set_is_named_and_made_anew(
    corpus: Path, harm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = prepare(str(corpus), "bpe:300")
    victim = first.folder / ("manifest.json" if harm in ("manifest", "format") else "validation.tokens.bin")
    content = bytearray(victim.read_bytes())
    if harm == "flip":
        content[len(content) // 2] ^= 1
    elif harm == "truncate":
        content = content[:-2]
    elif harm == "manifest":
        content = content[: len(content) // 2]
    elif harm == "format":
        content = content.replace(b'"bytes": ', b'"bytes": 1', 1)
    if harm == "remove":
        victim.unlink()
    else:
        victim.write_bytes(content)
    again = prepare(str(corpus), "bpe:300")
    assert str(victim) in capsys.readouterr().err
    assert again.fingerprint == first.fingerprint
    assert verify(str(corpus), "bpe:300")[1] == []


def test_verify_finds_what_a_sample_misses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    big = write(tmp_path / "big.jsonl", 3000)
    first = prepare(str(big), "bytes")
    victim = first.folder / "train.tokens.bin"
    assert victim.stat().st_size > 1_000_000
    with open(victim, "r+b") as file:
        file.seek(victim.stat().st_size // 62)  # between the first sampled block and the second
        file.write(b"!")
    assert prepare(str(big), "bytes").folder == first.folder
    assert capsys.readouterr().err == ""
    tokens, damage = verify(str(big), "bytes")
    assert [str(victim) in sentence for sentence in damage] == [True]
    assert tokens.fingerprint == first.fingerprint
    assert verify(str(big), "bytes")[1] == []


def test_killed_at_any_moment_nothing_looks_finished_and_the_next_call_works(
    tmp_path: Path, cache: Path
) -> None:
    corpus = write(tmp_path / "corpus.jsonl", 1500)
    for moment in ("locks/*.lock", "staging/*", "staging/*/train.tokens.bin"):
        child = start("prepare", corpus, "--tokenizer", "bpe:400")
        while not list(cache.glob(moment)) and child.poll() is None:
            time.sleep(0.001)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        assert child.returncode == -signal.SIGKILL
        for folder in sets(cache):  # the last moment is a narrow one: the child may have got through
            open_token_set(folder, full_check=True)  # whatever is visible is whole
    tokens = prepare(str(corpus), "bpe:400")
    assert list((cache / "staging").glob("*")) == []
    assert tokens.fingerprint == prepare(str(corpus), "bpe:400", cache_dir=tmp_path / "fresh").fingerprint


def test_two_processes_make_one_set(tmp_path: Path, cache: Path) -> None:
    corpus = write(tmp_path / "corpus.jsonl", 1500)
    children = [start("prepare", corpus, "--tokenizer", "bpe:400", "--json") for _ in range(2)]
    most = 0
    while any(child.poll() is None for child in children):
        most = max(most, len(list((cache / "staging").glob("*"))))
        time.sleep(0.001)
    results = [json.loads(child.communicate()[0]) for child in children]
    assert most == 1
    assert results[0]["fingerprint"] == results[1]["fingerprint"]
    assert len(sets(cache)) == 1


def test_leftovers_of_other_sets_are_swept(corpus: Path, cache: Path) -> None:
    (cache / "staging" / "0123456789abcdef.dead").mkdir(parents=True)
    (cache / "locks").mkdir()
    prepare(str(corpus), "bytes")
    assert list((cache / "staging").glob("*")) == []


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    import resource

    def small_files_only() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    corpus = write(tmp_path / "corpus.jsonl", 1000)
    child = start("prepare", corpus, "--tokenizer", "bytes", preexec_fn=small_files_only)
    _, said = child.communicate()
    assert child.returncode == 2
    assert said.startswith(f"qkflow: no space left for the cache {cache}")
    assert said.count("\n") == 1
    assert not sets(cache)
    assert list((cache / "staging").glob("*")) == []


def test_a_cache_that_cannot_be_written_is_one_sentence(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"cannot write to the cache .*file/cache .*: set QKFLOW_CACHE"):
        prepare(str(corpus), "bytes", cache_dir=tmp_path / "file" / "cache")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_cache_can_be_read(corpus: Path, cache: Path) -> None:
    first = prepare(str(corpus), "bytes")
    for folder in (cache, *cache.iterdir()):
        folder.chmod(0o555)
    try:
        assert prepare(str(corpus), "bytes").folder == first.folder
        with pytest.raises(InputError, match="cannot write to the cache"):
            prepare(str(corpus), "bpe:300")
    finally:
        for folder in (cache, *cache.iterdir()):
            folder.chmod(0o755)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"text": " "}\n', "holds no text"),
        ('{"text": "one"}\n', "single document"),
    ],
)
def test_too_little_text_is_refused_and_leaves_nothing(
    tmp_path: Path, cache: Path, content: str, sentence: str
) -> None:
    (tmp_path / "small.jsonl").write_text(content)
    with pytest.raises(InputError, match=sentence):
        prepare(str(tmp_path / "small.jsonl"), "bytes")
    assert not sets(cache)
    assert list((cache / "staging").glob("*")) == []


def test_a_source_that_changes_while_it_is_read_is_refused(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qkflow.data import pipeline

    tokenise = pipeline.tokenize_corpus

    def meddle(*arguments: object) -> None:
        tokenise(*arguments)  # type: ignore[arg-type]
        write(corpus, 5, seed=1)

    monkeypatch.setattr(pipeline, "tokenise", meddle)
    with pytest.raises(InputError, match="changed while it was being read"):
        prepare(str(corpus), "bytes")


def test_evaluation_knows_the_bytes_it_covers(corpus: Path, tmp_path: Path) -> None:
    tokens = prepare(str(corpus), "bpe:300")
    whole = tokens.eval_windows("validation", 16, 4)
    assert (whole.n_targets, whole.n_target_bytes) == (len(tokens.tokens("valid")), tokens.n_bytes("valid"))
    part = tokens.eval_windows("validation", 16, 4, max_tokens=64)
    text = tokens.tokenizer.decode([token for _, targets in part for token in targets.ravel().tolist()])
    assert part.n_target_bytes == len(text.encode())
    # a tokenizer that forgets spaces: the whole is exact all the same, and a part in proportion
    rust = RustTokenizer(models.WordLevel({"?": 0, "ba": 1, ".": 2}, unk_token="?"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    rust.save(str(tmp_path / "words.json"))
    words = prepare(str(corpus), str(tmp_path / "words.json"))
    assert words.eval_windows("validation", 16, 4).n_target_bytes == words.n_bytes("validation")
    half = words.eval_windows("validation", 16, 4, max_tokens=len(words.tokens("validation")) // 2)
    assert half.n_target_bytes == pytest.approx(words.n_bytes("validation") / 2, rel=0.2)


def test_own_splits_reach_the_set(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    for number, split in enumerate(("train", "valid", "test")):
        write(tmp_path / "own" / f"{split}.jsonl", 10 + number, seed=number)
    counts = prepare(str(tmp_path / "own"), "bytes").describe()["splits"]
    assert [counts[split]["documents"] for split in ("train", "validation", "test")] == [10, 11, 12]


def test_a_large_corpus_trains_its_tokenizer_on_a_part(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkflow.data.pipeline.TO_TRAIN_ON", 20_000)
    monkeypatch.setattr("qkflow.data.pipeline.BATCH", 10_000)
    tokens = prepare(str(corpus), "bpe:300")
    trained_on = tokens.describe()["corpus"]["tokenizer_trained_on_bytes"]
    assert 10_000 < trained_on < 40_000
    whole = prepare("patterns:documents=400,words=100", "bpe:300")
    assert whole.n_bytes("train") == tokens.n_bytes("train") > 4 * trained_on
