"""`patterns`: a generated corpus whose structure is known, to study when copying from the context pays.

Words follow Zipf's law. Two dials set what a model can gain beyond word frequencies: `repeat`, the share of
words copied from earlier in the same document, and `topics`/`mixing`, how far documents differ from one
another. Only `random.Random.random` and integers are used, so a seed gives the same text on every machine.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import accumulate
from random import Random

from qkflow.errors import InputError, unknown

GENERATOR_VERSION = 1  # part of the cache key: raise it when the same dials give other text than before
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


@dataclass(frozen=True)
class SyntheticGenerator:
    """The dials, as in `patterns:repeat=0.5,topics=4,seed=1`."""

    repeat: float = 0.3  # probability that the next span is copied from earlier in the document
    span: int = 8  # mean length in words of a span, copied or fresh
    topics: int = 1  # sets of words; a document keeps to its own ...
    mixing: float = 0.1  # ... except for this share of its words, drawn from any topic
    vocab_size: int = 2000  # words of a topic; the commonest tenth is shared by all
    zipf: float = 1.0  # exponent: the word of rank n has weight 1/n**zipf
    documents: int = 500
    words: int = 400  # words of a document
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("repeat", "mixing"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"patterns: {name}={getattr(self, name)} is not a share between 0 and 1")
        for name, least in {"span": 1, "topics": 1, "vocab_size": 10, "documents": 2, "words": 1}.items():
            if getattr(self, name) < least:
                raise InputError(f"patterns: {name}={getattr(self, name)} is below {least}")
        if not 0 <= self.zipf <= 10:
            raise InputError(f"patterns: zipf={self.zipf} is not between 0 and 10")

    def generate_documents(self) -> Iterator[str]:
        # Integer weights, so that no rounding of a sum can differ between machines.
        weights = [max(1, round(2**32 / rank**self.zipf)) for rank in range(1, self.vocab_size + 1)]
        cumulated = list(accumulate(weights))
        for number in range(self.documents):
            random = Random(f"{self.seed}/{number}")
            yield format_sentences(self._generate_words(random, number % self.topics, cumulated), random)

    def _generate_words(self, rng: Random, topic: int, cumulative_weights: list[int]) -> list[str]:
        words: list[str] = []
        while len(words) < self.words:
            length = 1 + int(rng.random() * (2 * self.span - 1))
            if words and rng.random() < self.repeat:
                start = int(rng.random() * max(1, len(words) - length + 1))
                words += words[start : start + length]
            else:
                words += [self._sample_word(rng, topic, cumulative_weights) for _ in range(length)]
        return words[: self.words]

    def _sample_word(self, rng: Random, topic: int, cumulative_weights: list[int]) -> str:
        rank = bisect_right(cumulative_weights, int(rng.random() * cumulative_weights[-1]))
        if rng.random() < self.mixing:
            topic = int(rng.random() * self.topics)
        shared = self.vocab_size // 10
        return word_for_rank(rank if rank < shared else rank + topic * (self.vocab_size - shared))


def parse_options(options: str) -> SyntheticGenerator:
    """`repeat=0.5,topics=4` -> Patterns; an empty string leaves every dial where it is."""
    types = {
        field.name: {"int": int, "float": float}[str(field.type)] for field in fields(SyntheticGenerator)
    }
    values: dict[str, float] = {}
    for dial in filter(None, options.split(",")):
        name, _, value = dial.partition("=")
        if name not in types:
            raise unknown("dial of patterns", name, types)
        try:
            values[name] = types[name](value)
        except ValueError as error:
            raise InputError(
                f"patterns: {name}='{value}' is not a number of type {types[name].__name__}"
            ) from error
    return SyntheticGenerator(**values)  # type: ignore[arg-type]


def word_for_rank(rank: int) -> str:
    """A pronounceable word for each number, short for small numbers, no two alike."""
    word = ""
    rank += 1
    while rank:
        rank, syllable = divmod(rank - 1, len(_SYLLABLES))
        word += _SYLLABLES[syllable]
    return word


def format_sentences(words: list[str], rng: Random) -> str:
    """Words in sentences of 5 to 20 words, four sentences a paragraph or so."""
    lines: list[str] = []
    at = 0
    while at < len(words):
        length = 5 + int(rng.random() * 16)
        end = "\n" if rng.random() < 0.25 else " "
        lines.append(" ".join(words[at : at + length]) + "." + end)
        at += length
    return "".join(lines).rstrip() + "\n"
