"""Turn a text into cloze questions, which teach a small model to answer from a context.

    python examples/cloze_corpus.py texts/ cloze.jsonl
    qkflow train runs/reader --data cloze.jsonl --preset tiny-swiglu --tokenizer bpe:4096 --tokens 4M
    qkflow pace study squad --data data/squad --pretrained runs/reader --window 16 --lr 2e-3 --ratios 1,3

A span of one to four words is cut out of a sentence. The question is the words around the gap, some of them
left out. The context is the text near the span, in a window that is shifted at random, as for the questions
of `qkflow pace study squad`. Lewis et al. (2019, arXiv 1906.04980) pretrain on cloze questions too, and
translate them to natural ones.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

from shared import run

from qkflow.data.corpora import resolve
from qkflow.data.readers.files import ReadProgress
from qkflow.errors import InputError
from qkflow.files import write_atomic

SPAN_LENGTHS = (1, 1, 2, 2, 3, 4)  # words of an answer
NEAR = 6  # words of a question on either side of the gap
KEPT = 0.7  # share of them that are kept
MIN_WORDS = 8  # of a sentence


def main(corpus: str, out: Path, /, examples: int = 150_000, window: int = 16, seed: int = 0) -> None:
    sentences = [
        sentence
        for split, document in resolve(corpus).iter_documents(ReadProgress())
        if split not in ("validation", "test")
        for sentence in re.split(r"(?<=[.!?])\s+|\n+", document)
        if len(sentence.split()) >= MIN_WORDS
    ]
    if not sentences:
        raise InputError(f"{corpus} has no sentence of {MIN_WORDS} words", code="no-sentences")
    rng = random.Random(seed)
    rows = [{"text": cloze(rng.choice(sentences), window, rng)} for _ in range(examples)]
    write_atomic(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    print(f"{examples:,} questions from {len(sentences):,} sentences")


def cloze(sentence: str, window: int, rng: random.Random) -> str:
    """Return a question about a span of the sentence, with its context and answer."""
    words = [match.span() for match in re.finditer(r"\S+", sentence)]
    length = rng.choice(SPAN_LENGTHS)
    first = rng.randrange(len(words) - length)
    start, end = words[first][0], words[first + length - 1][1]
    near_before, near_after = words[max(0, first - NEAR) : first], words[first + length :][:NEAR]
    before, after = (
        [sentence[slice(*word)] for word in near if rng.random() < KEPT] for near in (near_before, near_after)
    )
    orders = ([*before, "what", *after], ["what", *before, *after], [*before, *after])
    shift = rng.randint(0, 2 * window)
    context = sentence[max(0, start - shift) : end + 2 * window - shift]
    return f"Q: {' '.join(rng.choice(orders))}? C: {context} A: {sentence[start:end]}"


if __name__ == "__main__":
    run(main)
