"""The agreement grammar: positions, attractors, seeds and options."""

from __future__ import annotations

import pytest

from input_errors import raises_code
from qkflow.data.tasks.agreement_grammar import NOUNS, generate
from task_examples import marked_texts


def test_metadata_describes_the_sentence() -> None:
    numbers = {form: index for pair in NOUNS for index, form in enumerate(pair)}
    examples = generate(600, seed=3, max_modifiers=3, attractor_prob=0.6)
    assert sum(example.label == "PL" for example in examples) == 300
    for example in examples:
        words, metadata = example.text.split(), example.metadata
        plural = int(example.label == "PL")
        assert words[metadata["subject_index"]] == metadata["subject"]
        assert marked_texts(example) == [[metadata["subject"]]]
        assert numbers[metadata["subject"]] == plural
        assert metadata["verb_index"] == len(words)
        between = [numbers[word] for word in words[metadata["subject_index"] + 1 :] if word in numbers]
        assert len(between) == metadata["nouns_between"] <= 3
        assert sum(number != plural for number in between) == metadata["attractors"]
    attractors = [example.metadata["attractors"] for example in examples]
    assert sum(attractors) / sum(example.metadata["nouns_between"] for example in examples) == pytest.approx(
        0.6, abs=0.08
    )


def test_seeds_and_invalid_options() -> None:
    assert generate(20, seed=1) == generate(20, seed=1)
    assert generate(20, seed=1) != generate(20, seed=2)
    with raises_code("option-out-of-range"):
        generate(5, attractor_prob=2)
