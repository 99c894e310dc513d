"""What a corpus is like, in numbers that bear on attention: how much, how varied, how often it repeats."""

from __future__ import annotations

from typing import Any

import numpy as np

from qkflow.data.splits import SPLITS
from qkflow.data.token_set import TokenSet

SAMPLE = 2_000_000  # tokens of the train split that the repetition measures look at, at most
REACH = 512  # how far back, in tokens, they look


def describe(tokens: TokenSet) -> dict[str, Any]:
    """The set's own description, with counts per split and measures of its train split."""
    described = tokens.describe()
    for split in SPLITS:
        counts = described["splits"][split]
        counts["tokens_per_byte"] = counts["tokens"] / counts["bytes"] if counts["bytes"] else None
    train = tokens.tokens("train")
    sample = np.asarray(train[:SAMPLE], np.int64)
    return described | {
        "unigram_entropy_bits": unigram_entropy(train, tokens.vocab_size),
        "vocabulary_used": float(np.mean(_counts(train, tokens.vocab_size) > 0)),
        "repetition": repetition(sample, tokens.end_of_document),
        "duplicate_documents": duplicates(train, tokens.documents("train")),
    }


def unigram_entropy(tokens: np.ndarray, vocab_size: int) -> float:
    """Entropy in bits of a token drawn at random: what a model knows that looks at no context at all."""
    counts = _counts(tokens, vocab_size)
    shares = counts[counts > 0] / len(tokens)
    return float(-(shares * np.log2(shares)).sum())


def _counts(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(tokens), 1 << 24):  # bincount makes an int64 copy of what it is given
        counts += np.bincount(tokens[start : start + (1 << 24)], minlength=vocab_size)
    return counts


def repetition(tokens: np.ndarray, end_of_document: int) -> dict[str, float]:
    """How much of a text its own recent past foretells (within a document and the last REACH tokens).

    `seen`: share of tokens that occurred before. `copied` and `copied_2`: share of tokens that the rule of an
    induction head gets right, which looks for the last place where the present token (the present two)
    stood, and predicts what followed there.
    """
    document = np.cumsum(tokens == end_of_document)
    document[1:] = document[:-1].copy()  # an end token belongs to the document it ends
    document[0] = 0
    before = _last_occurrence(tokens, document)
    pairs = tokens[:-1] << 32 | tokens[1:]
    return {
        "reach": REACH,
        "seen": float(np.mean(before >= 0)),
        "copied": _foretold(tokens, before[:-1]),
        "copied_2": _foretold(tokens[1:], _last_occurrence(pairs, document[:-1])[:-1]),
    }


def _last_occurrence(values: np.ndarray, document: np.ndarray) -> np.ndarray:
    """For each place the last before it with the same value, in the same document and in reach, or -1."""
    order = np.argsort(values, kind="stable")
    before = np.full(len(values), -1)
    same = values[order[1:]] == values[order[:-1]]
    before[order[1:][same]] = order[:-1][same]
    places = np.arange(len(values))
    in_reach = (before >= 0) & (places - before <= REACH) & (document[before] == document)
    return np.where(in_reach, before, -1)


def _foretold(tokens: np.ndarray, before: np.ndarray) -> float:
    """Share of the tokens after the first that equal what followed at the place `before` the one in front."""
    return float(np.mean((before >= 0) & (tokens[before + 1] == tokens[1:])))


def duplicates(tokens: np.ndarray, documents: np.ndarray) -> float:
    """Share of documents that repeat an earlier one word for word."""
    count = len(documents) - 1
    distinct = {hash(tokens[documents[i] : documents[i + 1]].tobytes()) for i in range(count)}
    return 1 - len(distinct) / count
