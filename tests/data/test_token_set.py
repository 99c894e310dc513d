"""Token sets: documents, offsets, byte counts and the description."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers

from corpus_files import write_corpus
from qkflow.data import prepare


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QKFLOW_CACHE", str(tmp_path / "cache"))
    return write_corpus(tmp_path / "corpus.jsonl", 400)


def test_token_set_holds_every_document(corpus: Path) -> None:
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
    description = tokens.describe()
    assert description["splits"]["train"]["documents"] > 300
    assert json.loads(json.dumps(description)) == description
    assert description["corpus"]["license"] == "not recorded"
    assert description["tokenizer"]["eos_token_id"] == tokens.eos_token_id
    with pytest.raises(ValueError, match="read-only"):
        tokens.tokens("train")[0] = 1


def test_eval_windows_count_target_bytes(corpus: Path, tmp_path: Path) -> None:
    tokens = prepare(str(corpus), "bpe:300")
    whole = tokens.eval_windows("validation", 16, 4)
    assert (whole.n_targets, whole.n_target_bytes) == (len(tokens.tokens("valid")), tokens.n_bytes("valid"))
    part = tokens.eval_windows("validation", 16, 4, max_tokens=64)
    text = tokens.tokenizer.decode([token for _, targets in part for token in targets.ravel().tolist()])
    assert part.n_target_bytes == len(text.encode())
    # A tokenizer that drops spaces: exact for the whole split, proportional for a part.
    rust = RustTokenizer(models.WordLevel({"?": 0, "ba": 1, ".": 2}, unk_token="?"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    rust.save(str(tmp_path / "words.json"))
    words = prepare(str(corpus), str(tmp_path / "words.json"))
    assert words.eval_windows("validation", 16, 4).n_target_bytes == words.n_bytes("validation")
    half = words.eval_windows("validation", 16, 4, max_tokens=len(words.tokens("validation")) // 2)
    assert half.n_target_bytes == pytest.approx(words.n_bytes("validation") / 2, rel=0.2)


def test_corpus_whose_name_is_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKFLOW_CACHE", str(tmp_path / "cache"))
    path = tmp_path / os.fsdecode(b"caf\xe9.jsonl")
    write_corpus(path, 8)
    tokens = prepare(str(path), "bytes")  # reads back the manifest that it wrote
    assert prepare(str(path), "bytes").fingerprint == tokens.fingerprint
