"""Statistics of a corpus that matter for attention: size, entropy, and how much of it repeats."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from qkflow.data.splits import SPLITS
from qkflow.data.token_set import TokenSet
from qkflow.data.windows import check_token_ids

MAX_SAMPLED_TOKENS = 2_000_000  # tokens of the train split that repetition is measured on
_CHUNK_TOKENS = 1 << 24
LOOKBACK_TOKENS = 512
DISTANCES = (8, 32, 128, LOOKBACK_TOKENS)  # upper bounds of the distances that repetition is split by
TOPIC_PRIOR_TOKENS = tuple(4**i for i in range(2, 10))  # weights of the corpus against a document


def compute_stats(token_set: TokenSet) -> dict[str, Any]:
    """Return the set's description with tokens per byte of each split and statistics of the train split."""
    stats = token_set.describe()
    for split in SPLITS:
        counts = stats["splits"][split]
        counts["tokens_per_byte"] = counts["tokens"] / counts["bytes"] if counts["bytes"] else None
    train = token_set.tokens("train")
    for start in range(0, len(train), _CHUNK_TOKENS):
        check_token_ids(train[start : start + _CHUNK_TOKENS], token_set.vocab_size)
    sample = np.asarray(train[:MAX_SAMPLED_TOKENS], np.int64)
    return stats | {
        "unigram_entropy_bits": unigram_entropy(train, token_set.vocab_size),
        "vocab_used": float(np.mean(_token_counts(train, token_set.vocab_size) > 0)),
        "repetition": repetition_stats(sample, token_set.eos_token_id),
        "topic_bits": topic_bits(sample, token_set.document_offsets("train"), token_set.vocab_size),
        "duplicate_documents": duplicate_fraction(train, token_set.document_offsets("train")),
    }


def unigram_entropy(tokens: np.ndarray, vocab_size: int) -> float:
    """Return the entropy in bits of the token frequencies: the loss of a model without context."""
    counts = _token_counts(tokens, vocab_size)
    probabilities = counts[counts > 0] / len(tokens)
    return float(-(probabilities * np.log2(probabilities)).sum())


def _token_counts(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(tokens), _CHUNK_TOKENS):  # bincount makes an int64 copy of its input
        counts += np.bincount(tokens[start : start + _CHUNK_TOKENS], minlength=vocab_size)
    return counts


def repetition_stats(tokens: np.ndarray, eos_token_id: int) -> dict[str, float]:
    """Measure repetition within a document and the last LOOKBACK_TOKENS tokens.

    `seen` is the share of tokens that occurred before, and `seen_within_8` of those that did in the last 8
    tokens. `induction_1` and `induction_2` are the accuracies of
    the rule of an induction head: find the last occurrence of the current token (of the current two) and
    predict the token that followed it.
    """
    document_ids = np.cumsum(tokens == eos_token_id)
    document_ids[1:] = document_ids[:-1].copy()  # an end-of-document token belongs to its document
    document_ids[0] = 0
    previous = _last_occurrence(tokens, document_ids)
    distance = np.arange(len(tokens)) - previous
    pairs = tokens[:-1] << 32 | tokens[1:]
    return {
        "lookback_tokens": LOOKBACK_TOKENS,
        "seen": float(np.mean(previous >= 0)),
        **{
            f"seen_within_{bound}": float(np.mean((previous >= 0) & (distance <= bound)))
            for bound in DISTANCES[:-1]
        },
        "induction_1": _induction_accuracy(tokens, previous[:-1]),
        "induction_2": _induction_accuracy(tokens[1:], _last_occurrence(pairs, document_ids[:-1])[:-1]),
    }


def _last_occurrence(values: np.ndarray, document_ids: np.ndarray) -> np.ndarray:
    """Return for each position the last earlier one with the same value, document and within the lookback;
    -1 if there is none."""
    order = np.argsort(values, kind="stable")
    previous = np.full(len(values), -1)
    same = values[order[1:]] == values[order[:-1]]
    previous[order[1:][same]] = order[:-1][same]
    distance = np.arange(len(values)) - previous
    valid = (previous >= 0) & (distance <= LOOKBACK_TOKENS) & (document_ids[previous] == document_ids)
    return np.where(valid, previous, -1)


def _induction_accuracy(tokens: np.ndarray, previous: np.ndarray) -> float:
    """Return how often the token after `previous[i]` equals the token after i."""
    return float(np.mean((previous >= 0) & (tokens[previous + 1] == tokens[1:])))


def topic_bits(tokens: np.ndarray, document_offsets: np.ndarray, vocab_size: int) -> float:
    """Return how many bits per token the first half of a document saves on its second half.

    Both are coded with token frequencies alone: those of the corpus, and those of the first half smoothed
    with them by a Dirichlet prior, the best of TOPIC_PRIOR_TOKENS. Text of one topic gives 0.
    """
    frequencies = _token_counts(tokens, vocab_size) / max(len(tokens), 1)
    own, length, corpus = [], [], []  # of every token of a second half
    for start, end in itertools.pairwise(document_offsets):
        middle = (start + end) // 2
        if end > len(tokens) or middle == start:
            continue
        first, counts = np.unique(tokens[start:middle], return_counts=True)
        second = tokens[middle:end]
        nearest = np.minimum(np.searchsorted(first, second), len(first) - 1)
        own.append(np.where(first[nearest] == second, counts[nearest], 0))
        length.append(np.full(len(second), middle - start))
        corpus.append(frequencies[second])
    if not own:
        return 0.0
    count, size, expected = (np.concatenate(parts) for parts in (own, length, corpus))
    saved = (np.log2((count / expected + prior) / (size + prior)).mean() for prior in TOPIC_PRIOR_TOKENS)
    return max(0.0, float(max(saved)))


def duplicate_fraction(tokens: np.ndarray, document_offsets: np.ndarray) -> float:
    """Return the share of documents that are exact copies of an earlier one."""
    n_documents = len(document_offsets) - 1
    distinct = {
        hash(tokens[document_offsets[i] : document_offsets[i + 1]].tobytes()) for i in range(n_documents)
    }
    return 1 - len(distinct) / n_documents
