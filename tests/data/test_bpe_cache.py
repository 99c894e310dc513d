"""The word cache and splitting at spaces give the tokens of `tokenizers`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from bpe_texts import BPE, HARD_TEXT
from qkflow.data import synthetic
from qkflow.data.bpe_cache import (
    BPECache,
    bpe_cache_enabled,
    can_split_at_spaces,
    split_at_spaces,
    use_bpe_cache,
)

WORDS = st.lists(
    st.sampled_from(["the", "don't", "a", "", " ", "\n", "x.", "<|endoftext|>", "12"]), max_size=40
)


@given(st.lists(HARD_TEXT | WORDS.map(" ".join), min_size=1, max_size=6))
@settings(max_examples=400, deadline=None)
def test_cache_matches_tokenizers(texts: list[str]) -> None:
    cache = BPECache(BPE.backend_tokenizer, BPE.eos_token_id, BPE.dtype)
    expected = [t for text in texts for t in (*BPE.encode(text), BPE.eos_token_id)]
    for _ in range(3):  # the second time from the cache
        found = cache.encode(texts * 8)
        assert found is None or found.tolist() == expected * 8
    assert found is not None or len(expected) < 40


@given(HARD_TEXT | WORDS.map(" ".join), st.integers(1, 20))
@settings(max_examples=300, deadline=None)
def test_split_at_spaces_changes_no_token(text: str, piece_chars: int) -> None:
    pieces = split_at_spaces(text, piece_chars)
    assert "".join(pieces) == text
    assert [token for piece in pieces for token in BPE.encode(piece)] == BPE.encode(text)


def test_cache_size_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = list(synthetic.parse_options("patterns", "documents=80,vocab_size=200").generate_documents())
    monkeypatch.setattr("qkflow.data.bpe_cache._MAX_WORDS", 300)
    cache = BPECache(BPE.backend_tokenizer, BPE.eos_token_id, BPE.dtype)
    found = [cache.encode(texts[start : start + 20]) for start in range(0, 80, 20)]
    assert all(part is not None for part in found)
    assert np.array_equal(
        np.concatenate([p for p in found if p is not None]), BPE._encode_with_backend(texts)
    )
    assert len(cache._tokens_by_word) <= 300


def test_cache_declines_text_without_repeated_words() -> None:
    cache = BPECache(BPE.backend_tokenizer, BPE.eos_token_id, BPE.dtype)
    assert cache.encode(["".join(map(chr, range(0x4E00, 0x5E00)))]) is None


def test_can_split_at_spaces_rejects_other_tokenizers() -> None:
    assert can_split_at_spaces(BPE.backend_tokenizer)
    for change in ("prefix", "regex", "normalizer", "added", "dropout"):
        rust = RustTokenizer.from_str(BPE.to_str())
        if change == "prefix":
            rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        elif change == "regex":
            rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        elif change == "normalizer":
            rust.normalizer = normalizers.NFC()
        elif change == "added":
            rust.add_tokens([AddedToken("two words", special=False)])
        else:
            rust.model.dropout = 0.1
        assert not can_split_at_spaces(rust), change


def test_use_bpe_cache_switches_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["the the the 12 12 words"] * 20
    monkeypatch.setattr("qkflow.data.tokenizer.process_cpu_count", lambda: 1)
    tokenizer = type(BPE)(RustTokenizer.from_str(BPE.to_str()))
    cached = tokenizer.encode_documents(texts)
    monkeypatch.setattr(BPECache, "encode", lambda *_: pytest.fail("the cache was used"))
    with use_bpe_cache(False):
        assert not bpe_cache_enabled()
        assert np.array_equal(tokenizer.encode_documents(texts), cached)
    assert bpe_cache_enabled()
    with pytest.raises(pytest.fail.Exception):
        tokenizer.encode_documents(texts)
