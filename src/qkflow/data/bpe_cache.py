"""Word cache for byte-level BPE: the same tokens as `tokenizers`, several times faster per core.

GPT-2's pre-tokenizer never joins a single space to the text before it: every alternative of its pattern
matches a run of letters, digits or signs with *one* optional space in front, or whitespace alone. A text may
therefore be split before any space without other whitespace beside it, and each piece always encodes to the
same tokens. Words repeat, so each is encoded once and then looked up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

# Text decoded from UTF-8 has no lone surrogates, so they can serve as markers.
_PROTECTED_SPACE = "\ud800"  # a space that must not be split at
_TEXT_START = "\ud801"  # before the first word of a text, which has no space in front
_EOS_MARK = "\ud802"  # the end-of-document token

# Python's \s matches more than the pattern's: a space beside such a character is not split at.
_WHITESPACE_RUN = re.compile(r"\s{2,}")
_SINGLE_SPACE = re.compile(r" (?=\S)(?<=\S )")
_MAX_WORDS, _MAX_CHARS = 400_000, 16_000_000  # about 100 MB

_enabled = True


@contextmanager
def use_bpe_cache(enabled: bool) -> Iterator[None]:
    """Switch the word cache on or off inside the block, for all threads. The tokens are the same."""
    global _enabled
    before, _enabled = _enabled, enabled
    try:
        yield
    finally:
        _enabled = before


def bpe_cache_enabled() -> bool:
    """Return whether `encode_documents` may use the word cache."""
    return _enabled


def can_split_at_spaces(tokenizer: RustTokenizer) -> bool:
    """Return whether the tokenizer is plain byte-level BPE with GPT-2's pattern, as the module requires."""
    state = json.loads(tokenizer.to_str())
    pre_tokenizer, model = state["pre_tokenizer"] or {}, state["model"]
    return (
        state["normalizer"] is None
        and pre_tokenizer.get("type") == "ByteLevel"
        and pre_tokenizer.get("use_regex") is True
        and pre_tokenizer.get("add_prefix_space") is False
        and model["type"] == "BPE"
        and not any(model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
        and all(token["special"] for token in state["added_tokens"])
    )


class BPECache:
    """Encoder of documents that caches the tokens of each word."""

    def __init__(self, tokenizer: RustTokenizer, eos_token_id: int, dtype: np.dtype[Any]) -> None:
        self._tokenizer, self._dtype, self._lock = tokenizer, dtype, Lock()
        self._eos_bytes = np.array([eos_token_id], dtype).tobytes()
        self._clear()

    def _clear(self) -> None:
        self._tokens_by_word: dict[str, bytes] = {_EOS_MARK: self._eos_bytes}
        self._n_chars = 0

    def encode(self, texts: Iterable[str]) -> np.ndarray | None:
        """Return the tokens of the texts, an end-of-document token after each.

        Return None if more than a quarter of the words are new: then the cache does not pay.
        """
        words: list[str] = []
        for text in texts:
            pieces = _WHITESPACE_RUN.sub(_protect_spaces, text).split(" ")
            pieces[0] = _TEXT_START + pieces[0]
            words += pieces
            words.append(_EOS_MARK)
        with self._lock:
            new_words = set(words).difference(self._tokens_by_word)
            if len(new_words) * 4 > len(words):
                return None
            self._add_words(new_words)
            tokens = b"".join(map(self._tokens_by_word.__getitem__, words))
            if len(self._tokens_by_word) > _MAX_WORDS or self._n_chars > _MAX_CHARS:
                self._clear()
        return np.frombuffer(tokens, self._dtype)

    def _add_words(self, words: set[str]) -> None:
        unprotected = (word.replace(_PROTECTED_SPACE, " ") for word in words)
        texts = [word[1:] if word.startswith(_TEXT_START) else " " + word for word in unprotected]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        for word, encoding in zip(words, encodings, strict=True):
            self._tokens_by_word[word] = np.array(encoding.ids, self._dtype).tobytes()
            self._n_chars += len(word)


def _protect_spaces(run: re.Match[str]) -> str:
    return run[0].replace(" ", _PROTECTED_SPACE)


def split_at_spaces(text: str, piece_chars: int) -> list[str]:
    """Split a long text into pieces of about `piece_chars` characters, without changing its tokens."""
    pieces, start = [], 0
    while match := _SINGLE_SPACE.search(text, start + piece_chars):
        pieces.append(text[start : match.start()])
        start = match.start()
    return [*pieces, text[start:]]
