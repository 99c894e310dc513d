"""The cache under kills, concurrent processes, a full disk and missing permissions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from corpus_files import write_corpus
from input_errors import raises_code
from qkflow.data import prepare
from qkflow.data.cache import default_cache_dir
from qkflow.data.token_set import CorruptedTokenSetError, _manifest_checksum, open_token_set

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
    """A corpus of 400 documents, old enough for the index."""
    return write_corpus(tmp_path / "corpus.jsonl", 400)


def start_command(*arguments: str | Path, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, "data", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )


def token_sets(cache: Path) -> list[Path]:
    return sorted((cache / "sets").glob("*"))


def test_killed_process_leaves_no_partial_token_set(tmp_path: Path, cache: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", 1500)
    for moment in ("locks/*.lock", "staging/*", "staging/*/train.tokens.bin"):
        child = start_command("prepare", corpus, "--tokenizer", "bpe:400")
        while not list(cache.glob(moment)) and child.poll() is None:
            time.sleep(0.001)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        assert child.returncode == -signal.SIGKILL
        for folder in token_sets(cache):  # the child may have finished before the signal
            open_token_set(folder, full_check=True)  # a visible set is complete
    tokens = prepare(str(corpus), "bpe:400")
    assert list((cache / "staging").glob("*")) == []
    assert tokens.fingerprint == prepare(str(corpus), "bpe:400", cache_dir=tmp_path / "fresh").fingerprint


@pytest.mark.parametrize(
    "changes",
    [
        {"files": 3},
        {"dtype": "object"},
        {"tokenizer": {"spec": "bytes", "vocab_size": 300, "end_of_document": 256}},
        {"splits": {}},
        {"corpus": None},
    ],
)
def test_manifest_of_a_stranger_is_refused(changes: dict[str, object], corpus: Path) -> None:
    folder = prepare(str(corpus), "bytes").folder
    manifest = {**json.loads((folder / "manifest.json").read_bytes()), **changes}
    del manifest["seal"]  # a checksum that anybody can compute
    (folder / "manifest.json").write_text(json.dumps(manifest | {"seal": _manifest_checksum(manifest)}))
    with pytest.raises(CorruptedTokenSetError):
        open_token_set(folder)


def test_two_processes_build_one_token_set(tmp_path: Path, cache: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", 1500)
    children = [start_command("prepare", corpus, "--tokenizer", "bpe:400", "--json") for _ in range(2)]
    most = 0
    while any(child.poll() is None for child in children):
        most = max(most, len(list((cache / "staging").glob("*"))))
        time.sleep(0.001)
    results = [json.loads(child.communicate()[0]) for child in children]
    assert most == 1
    assert results[0]["fingerprint"] == results[1]["fingerprint"]
    assert len(token_sets(cache)) == 1


def test_stale_staging_of_other_sets_is_removed(corpus: Path, cache: Path) -> None:
    (cache / "staging" / "0123456789abcdef.dead").mkdir(parents=True)
    (cache / "locks").mkdir()
    prepare(str(corpus), "bytes")
    assert list((cache / "staging").glob("*")) == []


def test_full_disk_leaves_no_files(tmp_path: Path, cache: Path) -> None:
    import resource

    def limit_file_size() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    corpus = write_corpus(tmp_path / "corpus.jsonl", 1000)
    child = start_command("prepare", corpus, "--tokenizer", "bytes", preexec_fn=limit_file_size)
    _, stderr = child.communicate()
    assert child.returncode == 2
    assert "[disk-full]" in stderr
    assert str(cache) in stderr
    assert stderr.count("\n") == 1
    assert not token_sets(cache)
    assert list((cache / "staging").glob("*")) == []


def test_cache_not_writable(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with raises_code("cache-not-writable") as raised:
        prepare(str(corpus), "bytes", cache_dir=tmp_path / "file" / "cache")
    assert str(tmp_path / "file" / "cache") in str(raised.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_cache_can_be_read(corpus: Path, cache: Path) -> None:
    first = prepare(str(corpus), "bytes")
    for folder in (cache, *cache.iterdir()):
        folder.chmod(0o555)
    try:
        assert prepare(str(corpus), "bytes").folder == first.folder
        with raises_code("cache-not-writable"):
            prepare(str(corpus), "bpe:300")
    finally:
        for folder in (cache, *cache.iterdir()):
            folder.chmod(0o755)


def test_user_without_a_home_folder_is_told_to_set_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs with a user id without an account."""
    for name in ("HOME", "USERPROFILE", "XDG_CACHE_HOME", "LOCALAPPDATA", "QKFLOW_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 12345)
    with raises_code("no-home"):
        default_cache_dir()
