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
_HIDDEN_SPACE = "\ud800"  # a space that must not be cut at
_START = "\ud801"  # in front of a text's first word, which has no space before it
_END = "\ud802"  # stands for the end-of-document token

# Python's \s is a superset of the pattern's: a space beside doubtful whitespace is left alone.
_RUN = re.compile(r"\s{2,}")
_SINGLE_SPACE = re.compile(r" (?=\S)(?<=\S )")
_WORD_LIMIT, _LETTER_LIMIT = 400_000, 16_000_000  # about 100 MB


def can_cut_at_spaces(tokenizer: RustTokenizer) -> bool:
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


class WordMemory:
    """Encodes documents, each followed by the end-of-document token, remembering every word's tokens."""

    def __init__(self, tokenizer: RustTokenizer, end: int, dtype: np.dtype[Any]) -> None:
        self._tokenizer, self._dtype, self._lock = tokenizer, dtype, Lock()
        self._end = np.array([end], dtype).tobytes()
        self._forget()

    def _forget(self) -> None:
        self._tokens: dict[str, bytes] = {_END: self._end}
        self._letters = 0

    def encode(self, texts: Iterable[str]) -> np.ndarray | None:
        """The tokens, or None where words repeat so little that remembering them does not pay."""
        words: list[str] = []
        for text in texts:
            pieces = _RUN.sub(_hide_spaces, text).split(" ")
            pieces[0] = _START + pieces[0]
            words += pieces
            words.append(_END)
        with self._lock:
            new = set(words).difference(self._tokens)
            if len(new) * 4 > len(words):
                return None
            self._learn(new)
            tokens = b"".join(map(self._tokens.__getitem__, words))
            if len(self._tokens) > _WORD_LIMIT or self._letters > _LETTER_LIMIT:
                self._forget()
        return np.frombuffer(tokens, self._dtype)

    def _learn(self, words: set[str]) -> None:
        spelled = (word.replace(_HIDDEN_SPACE, " ") for word in words)
        texts = [word[1:] if word.startswith(_START) else " " + word for word in spelled]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        for word, encoding in zip(words, encodings, strict=True):
            self._tokens[word] = np.array(encoding.ids, self._dtype).tobytes()
            self._letters += len(word)


def _hide_spaces(run: re.Match[str]) -> str:
    return run[0].replace(" ", _HIDDEN_SPACE)


def cut_at_spaces(text: str, length: int) -> list[str]:
    """A long text in pieces of about `length` characters, cut where it changes no token."""
    pieces, at = [], 0
    while found := _SINGLE_SPACE.search(text, at + length):
        pieces.append(text[at : found.start()])
        at = found.start()
    return [*pieces, text[at:]]
