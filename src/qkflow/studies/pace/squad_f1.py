"""F1 of a generated answer over its words, as in SQuAD (Rajpurkar et al. 2016)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence


def squad_f1(prediction: str, references: Sequence[str]) -> float:
    """Return the maximum F1 over the reference answers."""
    return max(
        (_token_f1(_normalized_words(prediction), _normalized_words(each)) for each in references),
        default=0.0,
    )


def _token_f1(prediction: list[str], reference: list[str]) -> float:
    if not prediction or not reference:
        return float(prediction == reference)
    common = sum((Counter(prediction) & Counter(reference)).values())
    return 2 * common / (len(prediction) + len(reference))


def _normalized_words(text: str) -> list[str]:
    """Return the words in lower case, without punctuation and articles."""
    plain = "".join(char for char in text.lower() if char not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()
