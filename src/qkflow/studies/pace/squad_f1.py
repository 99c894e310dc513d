"""How right a written answer is: F1 of its words, as SQuAD counts them (Rajpurkar et al. 2016)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence


def f1(written: str, truths: Sequence[str]) -> float:
    """The best F1 against any of the right answers."""
    return max((_f1(_words(written), _words(truth)) for truth in truths), default=0.0)


def _f1(written: list[str], truth: list[str]) -> float:
    if not written or not truth:
        return float(written == truth)
    common = sum((Counter(written) & Counter(truth)).values())
    return 2 * common / (len(written) + len(truth))


def _words(text: str) -> list[str]:
    """Lower case, without punctuation and articles."""
    plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()
