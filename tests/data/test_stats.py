"""Corpus statistics on corpora with known values."""

from __future__ import annotations

import numpy as np
import pytest

from qkflow.data import stats


def test_unigram_entropy_of_known_distributions() -> None:
    assert stats.unigram_entropy(np.arange(8).repeat(5), 10) == pytest.approx(3.0)
    assert stats.unigram_entropy(np.zeros(7, np.uint16), 300) == 0.0


def test_repetition_stays_within_documents() -> None:
    end = 9
    tokens = np.array([1, 2, 3, 1, 2, 3, end, 1, 2, 4, end])
    measured = stats.repetition_stats(tokens, end)
    assert measured["seen"] == pytest.approx(3 / 11)  # the second 1 2 3
    assert measured["induction_1"] == pytest.approx(2 / 10)  # 2 after 1 and 3 after 2, not the end after 3
    assert measured["induction_2"] == pytest.approx(1 / 9)  # 3 after 1 2


def test_repetition_matches_definition_on_random_tokens() -> None:
    random = np.random.default_rng(0)
    tokens = random.integers(0, 40, 3000)
    measured = stats.repetition_stats(tokens, 39)
    seen = hits_1 = hits_2 = 0
    start = 0
    for i, token in enumerate(tokens.tolist()):
        past = [j for j in range(max(start, i - stats.LOOKBACK_TOKENS), i) if tokens[j] == token]
        seen += bool(past)
        if i + 1 < len(tokens) and past:
            hits_1 += tokens[past[-1] + 1] == tokens[i + 1]
        pairs = [
            j for j in range(max(start, i - stats.LOOKBACK_TOKENS), i) if j + 1 < i + 1 and tokens[j] == token
        ]
        pairs = [j for j in pairs if i + 2 < len(tokens) and tokens[j + 1] == tokens[i + 1]]
        if pairs:
            hits_2 += tokens[pairs[-1] + 2] == tokens[i + 2]
        if token == 39:
            start = i + 1
    assert measured["seen"] == pytest.approx(seen / 3000)
    assert measured["induction_1"] == pytest.approx(hits_1 / 2999)
    assert measured["induction_2"] == pytest.approx(hits_2 / 2998)


def test_repetition_beyond_the_lookback_is_ignored() -> None:
    tokens = np.arange(2000)
    tokens[1500] = 100
    assert stats.repetition_stats(tokens, -1)["seen"] == 0.0
    tokens[1500] = 1490
    assert stats.repetition_stats(tokens, -1)["seen"] == pytest.approx(1 / 2000)


def test_duplicate_fraction() -> None:
    tokens = np.array([1, 2, 9, 1, 2, 9, 3, 9])
    assert stats.duplicate_fraction(tokens, np.array([0, 3, 6, 8])) == pytest.approx(1 / 3)


def test_repetition_by_distance() -> None:
    tokens = np.arange(600)
    tokens[[20, 60, 200, 500]] = [15, 40, 100, 250]  # distances 5, 20, 100 and 250
    measured = stats.repetition_stats(tokens, -1)
    shares = [measured[name] * 600 for name in ("seen_within_8", "seen_within_32", "seen_within_128", "seen")]
    assert shares == pytest.approx([1, 2, 3, 4])


def test_topic_bits_of_mixed_and_of_equal_documents() -> None:
    """Documents with a vocabulary of their own are coded better after their first half."""
    random = np.random.default_rng(0)
    offsets = np.arange(0, 8001, 1000)
    own = np.concatenate([random.integers(8 * i, 8 * i + 8, 1000) for i in range(8)])
    assert stats.topic_bits(own, offsets, 64) == pytest.approx(3, abs=0.1)  # of 6 bits
    equal = random.integers(0, 64, 8000)
    assert stats.topic_bits(equal, offsets, 64) < 0.01
    assert stats.topic_bits(np.array([1]), np.array([0, 1]), 64) == 0.0
