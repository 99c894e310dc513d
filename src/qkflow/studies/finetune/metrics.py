"""Scores of predicted classes: accuracy, Matthews correlation and F1 (of class 1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np


def accuracy(labels: Sequence[int], predictions: Sequence[int]) -> float:
    return float(np.mean(np.equal(labels, predictions)))


def matthews_correlation(labels: Sequence[int], predictions: Sequence[int]) -> float:
    """Return the Matthews correlation coefficient of two classes; 0 if either side has a single class."""
    tp, fp, fn, tn = _confusion(labels, predictions)
    product = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    return float((tp * tn - fp * fn) / product**0.5) if product else 0.0


def f1(labels: Sequence[int], predictions: Sequence[int]) -> float:
    """Return the F1 of class 1; 0 if it is neither present nor predicted."""
    tp, fp, fn, _ = _confusion(labels, predictions)
    return 2 * tp / (2 * tp + fp + fn) if tp + fp + fn else 0.0


def _confusion(labels: Sequence[int], predictions: Sequence[int]) -> tuple[int, int, int, int]:
    """Return the counts of true positives, false positives, false negatives and true negatives."""
    counts = Counter(zip(labels, predictions, strict=True))
    return counts[1, 1], counts[0, 1], counts[1, 0], counts[0, 0]


METRICS: dict[str, Callable[[Sequence[int], Sequence[int]], float]] = {
    "accuracy": accuracy,
    "mcc": matthews_correlation,
    "f1": f1,
}


def score(names: Sequence[str], labels: Sequence[int], predictions: Sequence[int]) -> dict[str, float]:
    return {name: METRICS[name](labels, predictions) for name in names}
