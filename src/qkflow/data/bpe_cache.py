"""Byte-level BPE with a memory for words: the same tokens as `tokenizers`, several times sooner per core.

GPT-2's pre-tokenisation never joins a single space to what stands before it: every alternative of its
pattern either takes a run of letters, digits or signs with *one* optional space in front, or whitespace
alone. So a text may be cut before any space that has no other whitespace beside it, and what lies between
two cuts always encodes to the same tokens. Text repeats its words: each is encoded once, then looked up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

# Lone surrogates cannot occur in text that came from UTF-8, so they are free to mark things.
_PROTECTED_SPACE = "\ud800"  # a space that must not be cut at
_TEXT_START = "\ud801"  # in front of a text's first word, which has no space before it
_EOS_MARK = "\ud802"  # stands for the end-of-document token

# Python's \s is a superset of the pattern's: a space beside doubtful whitespace is left alone.
_WHITESPACE_RUN = re.compile(r"\s{2,}")
_SINGLE_SPACE = re.compile(r" (?=\S)(?<=\S )")
_MAX_WORDS, _MAX_CHARS = 400_000, 16_000_000  # about 100 MB


def can_split_at_spaces(tokenizer: RustTokenizer) -> bool:
    """Whether this is plain byte-level BPE behind GPT-2's pattern, so that the argument above holds."""
    state = json.loads(tokenizer.to_str())
    before, model = state["pre_tokenizer"] or {}, state["model"]
    return (
        state["normalizer"] is None
        and before.get("type") == "ByteLevel"
        and before.get("use_regex") is True
        and before.get("add_prefix_space") is False
        and model["type"] == "BPE"
        and not any(model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
        and all(token["special"] for token in state["added_tokens"])
    )


class BPECache:
    """Encodes documents, each followed by the end-of-document token, remembering every word's tokens."""

    def __init__(self, tokenizer: RustTokenizer, eos_token_id: int, dtype: np.dtype[Any]) -> None:
        self._tokenizer, self._dtype, self._lock = tokenizer, dtype, Lock()
        self._eos_bytes = np.array([eos_token_id], dtype).tobytes()
        self._clear()

    def _clear(self) -> None:
        self._tokens_by_word: dict[str, bytes] = {_EOS_MARK: self._eos_bytes}
        self._n_chars = 0

    def encode(self, texts: Iterable[str]) -> np.ndarray | None:
        """The tokens, or None where words repeat so little that remembering them does not pay."""
        words: list[str] = []
        for text in texts:
            pieces = _WHITESPACE_RUN.sub(_protect_spaces, text).split(" ")
            pieces[0] = _TEXT_START + pieces[0]
            words += pieces
            words.append(_EOS_MARK)
        with self._lock:
            new = set(words).difference(self._tokens_by_word)
            if len(new) * 4 > len(words):
                return None
            self._add_words(new)
            tokens = b"".join(map(self._tokens_by_word.__getitem__, words))
            if len(self._tokens_by_word) > _MAX_WORDS or self._n_chars > _MAX_CHARS:
                self._clear()
        return np.frombuffer(tokens, self._dtype)

    def _add_words(self, words: set[str]) -> None:
        spelled = (word.replace(_PROTECTED_SPACE, " ") for word in words)
        texts = [word[1:] if word.startswith(_TEXT_START) else " " + word for word in spelled]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        for word, encoding in zip(words, encodings, strict=True):
            self._tokens_by_word[word] = np.array(encoding.ids, self._dtype).tobytes()
            self._n_chars += len(word)


def _protect_spaces(run: re.Match[str]) -> str:
    return run[0].replace(" ", _PROTECTED_SPACE)


def split_at_spaces(text: str, piece_chars: int) -> list[str]:
    """A long text in pieces of about `length` characters, cut where it changes no token."""
    pieces, at = [], 0
    while found := _SINGLE_SPACE.search(text, at + piece_chars):
        pieces.append(text[at : found.start()])
        at = found.start()
    return [*pieces, text[at:]]
