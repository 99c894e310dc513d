"""Synthetic corpora of known structure, to study when copying from the context helps.

patterns  Words follow Zipf's law. Two options set what a model can gain beyond word frequencies: `repeat`,
          the share of words copied from earlier in the same document, and `topics`/`mixing`, how much
          documents differ from each other.
names     A document repeats a few names of two words in random order. The second word follows from the first
          only by what the document said before, and the distance tells nothing: a small model has to learn
          induction heads.

Only `random.Random.random` and integers are used, so a seed gives the same text on every machine.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import accumulate
from random import Random
from typing import Annotated, Any, ClassVar, get_type_hints

from qkflow.config_io import Count, Fraction, Range, Seed, check_ranges
from qkflow.errors import InputError, unknown

GENERATOR_VERSION = 1  # in the cache key: increase it when the same options give other text than before
RENAMED_OPTIONS = {"vocabulary": "vocab_size"}  # old -> new
MAX_BYTES = 20_000_000_000  # of the text
VocabSize = Annotated[int, Range(10, 10**7)]
BYTES_PER_WORD = 5  # approximately
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


@dataclass(frozen=True)
class PatternsGenerator:
    """The options of `patterns`, as in `patterns:repeat=0.5,topics=4,seed=1`."""

    corpus: ClassVar[str] = "patterns"

    repeat: Fraction = 0.3  # probability that the next span is copied from earlier in the document
    span: Count = 8  # mean length in words of a span, copied or new
    topics: Annotated[int, Range(1, 10**6)] = 1  # number of vocabularies; a document uses one of them ...
    mixing: Fraction = 0.1  # ... except for this share of its words, drawn from any topic
    vocab_size: VocabSize = 2000  # words of a topic; the most frequent tenth is shared by all topics
    zipf: Annotated[float, Range(0, 10)] = 1.0  # exponent: the word of rank n has weight 1/n**zipf
    documents: Annotated[int, Range(2)] = 500
    words: Annotated[int, Range(1)] = 400  # words per document
    seed: Seed = 0

    def __post_init__(self) -> None:
        _check_options(self)

    def cache_key(self) -> list[tuple[str, Any]]:
        """Return the options under the names they had when `GENERATOR_VERSION` was last increased."""
        old_names = {new: old for old, new in RENAMED_OPTIONS.items()}
        return [(old_names.get(name, name), value) for name, value in vars(self).items()]

    def generate_documents(self) -> Iterator[str]:
        # Integer weights: rounding of a sum of floats could differ between machines.
        weights = [max(1, round(2**32 / rank**self.zipf)) for rank in range(1, self.vocab_size + 1)]
        cumulative_weights = list(accumulate(weights))
        for number in range(self.documents):
            rng = Random(f"{self.seed}/{number}")
            yield format_sentences(self._generate_words(rng, number % self.topics, cumulative_weights), rng)

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
        n_shared = self.vocab_size // 10
        return word_for_rank(rank if rank < n_shared else rank + topic * (self.vocab_size - n_shared))


@dataclass(frozen=True)
class NamesGenerator:
    """The options of `names`, as in `names:names=8,seed=1`."""

    corpus: ClassVar[str] = "names"

    names: Annotated[int, Range(2, 10**4)] = 5  # names of a document; no two share a word
    vocab_size: VocabSize = 16
    documents: Annotated[int, Range(2)] = 20_000
    words: Annotated[int, Range(2)] = 64  # words per document
    seed: Seed = 0

    def __post_init__(self) -> None:
        _check_options(self)
        if 2 * self.names > self.vocab_size:
            raise InputError(
                f"names: {self.names} names need {2 * self.names} words, more than vocab_size="
                f"{self.vocab_size}",
                code="vocab-too-small",
            )

    def cache_key(self) -> list[tuple[str, Any]]:
        return list(vars(self).items())

    def generate_documents(self) -> Iterator[str]:
        for number in range(self.documents):
            vocabulary = [word_for_rank(rank) for rank in range(self.vocab_size)]
            rng = Random(f"{self.seed}/{number}")
            for last in range(self.vocab_size - 1, 0, -1):  # Fisher-Yates
                other = int(rng.random() * (last + 1))
                vocabulary[last], vocabulary[other] = vocabulary[other], vocabulary[last]
            names = [" ".join(vocabulary[i : i + 2]) for i in range(0, 2 * self.names, 2)]
            chosen = [names[int(rng.random() * self.names)] for _ in range(-(-self.words // 2))]
            yield " ".join(chosen) + "\n"


Generator = PatternsGenerator | NamesGenerator
GENERATORS: dict[str, type[Generator]] = {kind.corpus: kind for kind in (PatternsGenerator, NamesGenerator)}


def _check_options(generator: Generator) -> None:
    check_ranges(generator, generator.corpus)
    size = generator.documents * generator.words * BYTES_PER_WORD
    if size > MAX_BYTES:
        raise InputError(
            f"{generator.corpus}: documents={generator.documents}, words={generator.words} would be "
            f"{size / 1e9:,.0f} GB of text: choose less than {MAX_BYTES / 1e9:g} GB",
            code="corpus-too-large",
        )


def parse_options(corpus: str, options: str) -> Generator:
    """Parse `repeat=0.5,topics=4`. Options that are not given have their defaults."""
    kind = GENERATORS[corpus]
    hints = get_type_hints(kind)
    types = {field.name: hints[field.name] for field in fields(kind)}
    values: dict[str, float] = {}
    for option in filter(None, options.split(",")):
        name, _, value = option.partition("=")
        if name in RENAMED_OPTIONS:
            raise InputError(
                f"{corpus}: the option '{name}' is now '{RENAMED_OPTIONS[name]}'", code="renamed-option"
            )
        if name not in types:
            raise unknown(f"option of {corpus}", name, types)
        try:
            values[name] = types[name](value)
        except ValueError as error:
            raise InputError(
                f"{corpus}: {name}='{value}' is not of type {types[name].__name__}", code="not-a-number"
            ) from error
    return kind(**values)  # type: ignore[arg-type]


def word_for_rank(rank: int) -> str:
    """Return a distinct pronounceable word for each rank; low ranks get short words."""
    word = ""
    rank += 1
    while rank:
        rank, syllable = divmod(rank - 1, len(_SYLLABLES))
        word += _SYLLABLES[syllable]
    return word


def format_sentences(words: list[str], rng: Random) -> str:
    """Join words into sentences of 5 to 20 words and paragraphs of about four sentences."""
    lines: list[str] = []
    start = 0
    while start < len(words):
        length = 5 + int(rng.random() * 16)
        end = "\n" if rng.random() < 0.25 else " "
        lines.append(" ".join(words[start : start + length]) + "." + end)
        start += length
    return "".join(lines).rstrip() + "\n"
