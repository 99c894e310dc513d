"""What a corpus is like, in numbers that bear on attention: how much, how varied, how often it repeats."""

from __future__ import annotations

from typing import Any

import numpy as np

from qkflow.data.splits import SPLITS
from qkflow.data.token_set import TokenSet

MAX_SAMPLED_TOKENS = 2_000_000  # tokens of the train split that the repetition measures look at, at most
LOOKBACK_TOKENS = 512  # how far back, in tokens, they look


def compute_stats(token_set: TokenSet) -> dict[str, Any]:
    """The set's own description, with counts per split and measures of its train split."""
    described = token_set.describe()
    for split in SPLITS:
        counts = described["splits"][split]
        counts["tokens_per_byte"] = counts["tokens"] / counts["bytes"] if counts["bytes"] else None
    train = token_set.tokens("train")
    sample = np.asarray(train[:MAX_SAMPLED_TOKENS], np.int64)
    return described | {
        "unigram_entropy_bits": unigram_entropy(train, token_set.vocab_size),
        "vocabulary_used": float(np.mean(_token_counts(train, token_set.vocab_size) > 0)),
        "repetition": repetition_stats(sample, token_set.eos_token_id),
        "duplicate_documents": duplicate_fraction(train, token_set.document_offsets("train")),
    }


def unigram_entropy(tokens: np.ndarray, vocab_size: int) -> float:
    """Entropy in bits of a token drawn at random: what a model knows that looks at no context at all."""
    counts = _token_counts(tokens, vocab_size)
    shares = counts[counts > 0] / len(tokens)
    return float(-(shares * np.log2(shares)).sum())


def _token_counts(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(tokens), 1 << 24):  # bincount makes an int64 copy of what it is given
        counts += np.bincount(tokens[start : start + (1 << 24)], minlength=vocab_size)
    return counts


def repetition_stats(tokens: np.ndarray, eos_token_id: int) -> dict[str, float]:
    """How much of a text its own recent past foretells (within a document and the last REACH tokens).

    `seen`: share of tokens that occurred before. `copied` and `copied_2`: share of tokens that the rule of an
    induction head gets right, which looks for the last place where the present token (the present two)
    stood, and predicts what followed there.
    """
    document = np.cumsum(tokens == eos_token_id)
    document[1:] = document[:-1].copy()  # an end token belongs to the document it ends
    document[0] = 0
    before = _last_occurrence(tokens, document)
    pairs = tokens[:-1] << 32 | tokens[1:]
    return {
        "reach": LOOKBACK_TOKENS,
        "seen": float(np.mean(before >= 0)),
        "copied": _induction_accuracy(tokens, before[:-1]),
        "copied_2": _induction_accuracy(tokens[1:], _last_occurrence(pairs, document[:-1])[:-1]),
    }


def _last_occurrence(values: np.ndarray, document_ids: np.ndarray) -> np.ndarray:
    """For each place the last before it with the same value, in the same document and in reach, or -1."""
    order = np.argsort(values, kind="stable")
    before = np.full(len(values), -1)
    same = values[order[1:]] == values[order[:-1]]
    before[order[1:][same]] = order[:-1][same]
    places = np.arange(len(values))
    in_reach = (before >= 0) & (places - before <= LOOKBACK_TOKENS) & (document_ids[before] == document_ids)
    return np.where(in_reach, before, -1)


def _induction_accuracy(tokens: np.ndarray, previous: np.ndarray) -> float:
    """Share of the tokens after the first that equal what followed at the place `before` the one in front."""
    return float(np.mean((previous >= 0) & (tokens[previous + 1] == tokens[1:])))


def duplicate_fraction(tokens: np.ndarray, document_offsets: np.ndarray) -> float:
    """Share of documents that repeat an earlier one word for word."""
    count = len(document_offsets) - 1
    distinct = {hash(tokens[document_offsets[i] : document_offsets[i + 1]].tobytes()) for i in range(count)}
    return 1 - len(distinct) / count
