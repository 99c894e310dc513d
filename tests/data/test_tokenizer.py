"""Tokenizers: text survives, faster ways agree with the library, bytes are counted right."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from qkflow.data import synthetic
from qkflow.data import tokenizer as tokenizers
from qkflow.data.bpe_cache import BPECache, can_split_at_spaces, split_at_spaces
from qkflow.errors import InputError

# Everything that could upset a cut: runs and kinds of whitespace, contractions, digits, marks, other scripts.
NASTY = st.text(
    st.sampled_from(
        "  \n\t\r\x0b\x1c\x1f\x85\xa0\u1680\u2003\u2028\u200b\u3000ab'sdlé1²٣.,<|>endoftext漢字🙂\u0301"
    ),
    max_size=60,
)
WORDS = st.lists(
    st.sampled_from(["the", "don't", "a", "", " ", "\n", "x.", "<|endoftext|>", "12"]), max_size=40
)


def trained(size: int = 400) -> tokenizers.HuggingFaceTokenizer:
    texts = [
        *synthetic.parse_options("documents=30,words=200").generate_documents(),
        "don't  the the\n\n  the 12 12. <|endoftext|>  end" * 20,
    ]
    return tokenizers.train_bpe(iter(texts), size)


BPE = trained()


@given(NASTY | st.text())
@settings(max_examples=200, deadline=None)
def test_text_survives_the_way_there_and_back(text: str) -> None:
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        return
    for tokenizer in (tokenizers.ByteTokenizer(), BPE):
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        assert tokenizer.eos_token_id not in tokens
        assert tokenizer.token_bytes()[tokens].sum() == len(text.encode())
        assert tokenizer.encode_documents([text]).tolist() == [*tokens, tokenizer.eos_token_id]


@given(st.lists(NASTY | WORDS.map(" ".join), min_size=1, max_size=6))
@settings(max_examples=400, deadline=None)
def test_a_memory_for_words_gives_the_librarys_tokens(texts: list[str]) -> None:
    memory = BPECache(BPE.backend_tokenizer, BPE.eos_token_id, BPE.dtype)
    expected = [t for text in texts for t in (*BPE.encode(text), BPE.eos_token_id)]
    for _ in range(3):  # repeated texts are taken from memory
        found = memory.encode(texts * 8)
        assert found is None or found.tolist() == expected * 8
    assert found is not None or len(expected) < 40


@given(NASTY | WORDS.map(" ".join), st.integers(1, 20))
@settings(max_examples=300, deadline=None)
def test_cutting_a_long_text_changes_no_token(text: str, length: int) -> None:
    pieces = split_at_spaces(text, length)
    assert "".join(pieces) == text
    assert [token for piece in pieces for token in BPE.encode(piece)] == BPE.encode(text)


def test_memory_and_library_agree_on_running_text_and_memory_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = list(synthetic.parse_options("documents=80,vocabulary=200").generate_documents())
    monkeypatch.setattr("qkflow.data.bpe_cache._WORD_LIMIT", 300)
    memory = BPECache(BPE.backend_tokenizer, BPE.eos_token_id, BPE.dtype)
    found = [memory.encode(texts[start : start + 20]) for start in range(0, 80, 20)]
    assert all(part is not None for part in found)
    assert np.array_equal(
        np.concatenate([p for p in found if p is not None]), BPE._encode_with_backend(texts)
    )
    assert len(memory._tokens_by_word) <= 300


def test_text_without_repeated_words_is_left_to_the_library() -> None:
    memory = BPECache(BPE.backend_tokenizer, BPE.eos_token_id, BPE.dtype)
    assert memory.encode(["".join(map(chr, range(0x4E00, 0x5E00)))]) is None


def test_a_text_cannot_forge_the_end_of_a_document() -> None:
    tokens = BPE.encode_documents(["a<|endoftext|>b", "<|endoftext|>"] * 50)
    assert np.count_nonzero(tokens == BPE.eos_token_id) == 100
    assert BPE.decode(BPE.encode("a<|endoftext|>b")) == "a<|endoftext|>b"


def test_training_is_deterministic_and_of_the_size_asked_for() -> None:
    assert trained(500).state() == trained(500).state()
    assert trained(500).vocab_size == 500


def test_a_state_restores_the_tokenizer() -> None:
    for tokenizer in (BPE, tokenizers.ByteTokenizer()):
        again = tokenizers.tokenizer_from_str(tokenizer.state(), tokenizer.eos_token_id)
        assert again.encode("the same words") == tokenizer.encode("the same words")
        assert (again.vocab_size, again.eos_token_id) == (tokenizer.vocab_size, tokenizer.eos_token_id)


@pytest.fixture
def gpt2_layout(tmp_path: Path) -> Path:
    """A vocabulary laid out as GPT-2's was released."""
    state = json.loads(BPE.state())
    vocabulary = {**state["model"]["vocab"]}
    (tmp_path / "encoder.json").write_text(json.dumps(vocabulary))
    merges = "".join(" ".join(merge) + "\n" for merge in state["model"]["merges"])
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n" + merges)
    return tmp_path


def test_tokenizers_load_from_files_folders_and_gpt2s_layout(gpt2_layout: Path, tmp_path: Path) -> None:
    text = "the 12 words, don't  you know"
    for spec in (gpt2_layout, gpt2_layout / "encoder.json", gpt2_layout / "vocab.bpe"):
        loaded = tokenizers.load_tokenizer(str(spec))
        assert loaded.encode(text) == BPE.encode(text)
        assert loaded.eos_token_id == BPE.eos_token_id
    (gpt2_layout / "encoder.json").rename(gpt2_layout / "vocab.json")
    (gpt2_layout / "vocab.bpe").rename(gpt2_layout / "merges.txt")
    assert tokenizers.load_tokenizer(str(gpt2_layout)).encode(text) == BPE.encode(text)
    (tmp_path / "tokenizer.json").write_text(BPE.state())
    for spec in (tmp_path, tmp_path / "tokenizer.json"):
        assert tokenizers.load_tokenizer(str(spec)).encode(text) == BPE.encode(text)
    before = tokenizers.stamp(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text(trained(300).state())
    assert tokenizers.stamp(str(tmp_path)) != before


def test_an_end_token_is_declared_guessed_or_added(tmp_path: Path) -> None:
    words = {"[UNK]": 0, "a": 1, "b": 2, "</s>": 3, "<stop>": 4}
    rust = RustTokenizer(models.WordLevel(words, unk_token="[UNK]"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    rust.normalizer = normalizers.Lowercase()
    rust.enable_truncation(2)
    rust.enable_padding(length=9)
    rust.save(str(tmp_path / "tokenizer.json"))
    loaded = tokenizers.load_tokenizer(str(tmp_path))
    assert loaded.eos_token_id == 3
    assert loaded.encode_documents(["A b a b", "b"]).tolist() == [
        1,
        2,
        1,
        2,
        3,
        2,
        3,
    ]  # neither cut nor padded
    assert not can_split_at_spaces(loaded.rust)  # type: ignore[attr-defined]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<stop>"}}))
    assert tokenizers.load_tokenizer(str(tmp_path)).eos_token_id == 4
    bare = RustTokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    added = tokenizers.HuggingFaceTokenizer(bare)
    assert (added.eos_token_id, added.vocab_size) == (2, 3)


def test_cutting_is_only_trusted_where_it_is_proven() -> None:
    assert can_split_at_spaces(BPE.backend_tokenizer)
    for spoil in ("prefix", "regex", "normalizer", "added", "dropout"):
        rust = RustTokenizer.from_str(BPE.state())
        if spoil == "prefix":
            rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        elif spoil == "regex":
            rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        elif spoil == "normalizer":
            rust.normalizer = normalizers.NFC()
        elif spoil == "added":
            rust.add_tokens([AddedToken("two words", special=False)])
        else:
            rust.model.dropout = 0.1
        assert not can_split_at_spaces(rust), spoil


def test_large_vocabularies_take_four_bytes_a_token() -> None:
    rust = RustTokenizer(models.WordLevel({f"w{i}": i for i in range(70_000)}, unk_token="w0"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = tokenizers.HuggingFaceTokenizer(rust)
    assert tokenizer.encode_documents(["w69999"]).tolist() == [69_999, 70_000]
    assert tokenizer.dtype == np.uint32
    assert BPE.dtype == np.uint16


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("bpe", "needs a vocabulary between 257"),
        ("bpe:100", "needs a vocabulary between 257"),
        ("bpe:2k", "needs a vocabulary between 257"),
        ("byte", "unknown tokenizer 'byte': did you mean 'bytes'"),
        ("./none.json", "there is no tokenizer at ./none.json"),
        (".", "holds neither tokenizer.json nor encoder.json"),
    ],
)
def test_bad_names_get_one_sentence(
    spec: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=sentence):
        tokenizers.stamp(spec)


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(InputError, match=r"broken.json cannot be read as a tokenizer"):
        tokenizers.load_tokenizer(str(tmp_path / "broken.json"))


def test_a_hub_tokenizer_without_network_says_what_to_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        InputError, match=r"127.0.0.1 cannot be reached: pass a local copy, as the path of its"
    ):
        tokenizers.load_tokenizer("hf:nobody/nothing-of-this-name")
