from __future__ import annotations

import numpy as np
import pytest

from qkflow.studies.finetune.metrics import accuracy, f1, matthews_correlation, score

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 2, 200).tolist()
PREDICTIONS = [int(label if RNG.random() < 0.7 else 1 - label) for label in LABELS]


def test_matthews_correlation_is_the_correlation_of_binary_variables() -> None:
    expected = np.corrcoef(LABELS, PREDICTIONS)[0, 1]
    assert matthews_correlation(LABELS, PREDICTIONS) == pytest.approx(expected, abs=1e-12)
    assert matthews_correlation([0, 1], [1, 0]) == -1


def test_matthews_correlation_of_a_constant_prediction_is_zero() -> None:
    assert matthews_correlation([0, 1, 1], [1, 1, 1]) == 0


def test_f1_is_the_harmonic_mean_of_precision_and_recall() -> None:
    hits = sum(a == b == 1 for a, b in zip(LABELS, PREDICTIONS, strict=True))
    precision, recall = hits / sum(PREDICTIONS), hits / sum(LABELS)
    assert f1(LABELS, PREDICTIONS) == pytest.approx(2 / (1 / precision + 1 / recall))
    assert f1([0, 0], [0, 0]) == 0


def test_score_has_the_named_metrics() -> None:
    assert accuracy([0, 1, 1, 0], [0, 1, 0, 0]) == 0.75
    assert score(("accuracy", "f1"), [0, 1], [0, 1]) == {"accuracy": 1.0, "f1": 1.0}
