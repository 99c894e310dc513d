"""Tokenizers: round trips, byte counts, special tokens, files and errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, normalizers, pre_tokenizers

from bpe_texts import BPE, HARD_TEXT, train_small_bpe
from input_errors import raises_code
from qkflow.data import tokenizer as tokenizers
from qkflow.data.bpe_cache import can_split_at_spaces


@given(HARD_TEXT | st.text())
@settings(max_examples=200, deadline=None)
def test_encode_decode_round_trip(text: str) -> None:
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        return
    for tokenizer in (tokenizers.ByteTokenizer(), BPE):
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        assert tokenizer.eos_token_id not in tokens
        assert tokenizer.token_bytes()[tokens].sum() == len(text.encode())
        assert tokenizer.encode_documents([text]).tolist() == [*tokens, tokenizer.eos_token_id]


def test_eos_token_in_text_is_ordinary_text() -> None:
    tokens = BPE.encode_documents(["a<|endoftext|>b", "<|endoftext|>"] * 50)
    assert np.count_nonzero(tokens == BPE.eos_token_id) == 100
    assert BPE.decode(BPE.encode("a<|endoftext|>b")) == "a<|endoftext|>b"


def test_bpe_training_is_deterministic() -> None:
    assert train_small_bpe(500).to_str() == train_small_bpe(500).to_str()
    assert train_small_bpe(500).vocab_size == 500


def test_tokenizer_from_str_round_trip() -> None:
    for tokenizer in (BPE, tokenizers.ByteTokenizer()):
        again = tokenizers.tokenizer_from_str(tokenizer.to_str(), tokenizer.eos_token_id)
        assert again.encode("the same words") == tokenizer.encode("the same words")
        assert (again.vocab_size, again.eos_token_id) == (tokenizer.vocab_size, tokenizer.eos_token_id)


@pytest.fixture
def gpt2_layout(tmp_path: Path) -> Path:
    """A folder with vocabulary and merges in GPT-2's layout."""
    state = json.loads(BPE.to_str())
    vocab = {**state["model"]["vocab"]}
    (tmp_path / "encoder.json").write_text(json.dumps(vocab))
    merges = "".join(" ".join(merge) + "\n" for merge in state["model"]["merges"])
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n" + merges)
    return tmp_path


def test_load_tokenizer_from_file_folder_and_gpt2_layout(gpt2_layout: Path, tmp_path: Path) -> None:
    text = "the 12 words, don't  you know"
    for spec in (gpt2_layout, gpt2_layout / "encoder.json", gpt2_layout / "vocab.bpe"):
        loaded = tokenizers.load_tokenizer(str(spec))
        assert loaded.encode(text) == BPE.encode(text)
        assert loaded.eos_token_id == BPE.eos_token_id
    (gpt2_layout / "encoder.json").rename(gpt2_layout / "vocab.json")
    (gpt2_layout / "vocab.bpe").rename(gpt2_layout / "merges.txt")
    assert tokenizers.load_tokenizer(str(gpt2_layout)).encode(text) == BPE.encode(text)
    (tmp_path / "tokenizer.json").write_text(BPE.to_str())
    for spec in (tmp_path, tmp_path / "tokenizer.json"):
        assert tokenizers.load_tokenizer(str(spec)).encode(text) == BPE.encode(text)
    before = tokenizers.stamp(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text(train_small_bpe(300).to_str())
    assert tokenizers.stamp(str(tmp_path)) != before


def test_eos_token_is_configured_guessed_or_added(tmp_path: Path) -> None:
    words = {"[UNK]": 0, "a": 1, "b": 2, "</s>": 3, "<stop>": 4}
    rust = RustTokenizer(models.WordLevel(words, unk_token="[UNK]"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    rust.normalizer = normalizers.Lowercase()
    rust.enable_truncation(2)
    rust.enable_padding(length=9)
    rust.save(str(tmp_path / "tokenizer.json"))
    loaded = tokenizers.load_tokenizer(str(tmp_path))
    assert loaded.eos_token_id == 3
    # neither truncated nor padded
    assert loaded.encode_documents(["A b a b", "b"]).tolist() == [1, 2, 1, 2, 3, 2, 3]
    assert not can_split_at_spaces(loaded.backend_tokenizer)  # type: ignore[attr-defined]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<stop>"}}))
    assert tokenizers.load_tokenizer(str(tmp_path)).eos_token_id == 4
    bare = RustTokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    added = tokenizers.HuggingFaceTokenizer(bare)
    assert (added.eos_token_id, added.vocab_size) == (2, 3)


def test_dtype_depends_on_vocab_size() -> None:
    rust = RustTokenizer(models.WordLevel({f"w{i}": i for i in range(70_000)}, unk_token="w0"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = tokenizers.HuggingFaceTokenizer(rust)
    assert tokenizer.encode_documents(["w69999"]).tolist() == [69_999, 70_000]
    assert tokenizer.dtype == np.uint32
    assert BPE.dtype == np.uint16


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        ("bpe", "invalid-vocab-size"),
        ("bpe:100", "invalid-vocab-size"),
        ("bpe:2k", "invalid-vocab-size"),
        ("byte", "unknown-tokenizer"),
        ("./none.json", "tokenizer-not-found"),
        (".", "no-tokenizer-in-folder"),
    ],
)
def test_invalid_tokenizer_specs(
    spec: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with raises_code(code):
        tokenizers.stamp(spec)


def test_invalid_tokenizer_file(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{}")
    with raises_code("invalid-tokenizer-file") as raised:
        tokenizers.load_tokenizer(str(tmp_path / "broken.json"))
    assert "broken.json" in str(raised.value)


def test_hub_tokenizer_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with raises_code("hub-unreachable"):
        tokenizers.load_tokenizer("hf:nobody/nothing-of-this-name")


def test_text_that_encodes_to_the_eos_token() -> None:
    words = RustTokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = tokenizers.HuggingFaceTokenizer(words, eos_token="[UNK]")
    assert tokenizer.encode_documents(["a b"]).tolist() == [1, 2, 0]
    with raises_code("eos-token-in-text"):
        tokenizer.encode_documents(["a c b"])
