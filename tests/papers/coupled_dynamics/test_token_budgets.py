"""Predictions of the gain at the largest budget."""

from __future__ import annotations

import numpy as np
import pytest

from qkflow.papers.coupled_dynamics.token_budgets import Point, predict_largest, token_factors
from qkflow.studies.stats import paired_difference

TOKENS = np.array([0.25e6, 0.5e6, 1e6, 4e6])


def loss(tokens: np.ndarray) -> np.ndarray:
    """A loss that is linear in log t, as between two budgets."""
    return 8 - 0.3 * np.log(tokens)


def points(differences: np.ndarray) -> list[Point]:
    noise = np.array([-0.01, 0.0, 0.01])
    return [
        Point(t, paired_difference(value + d + noise, value + np.zeros(3)), value)
        for t, d, value in zip(TOKENS, differences, loss(TOKENS), strict=True)
    ]


@pytest.mark.parametrize(
    ("hypothesis", "differences", "others_inside"),
    [
        # with a loss that is linear in log t, a constant factor is a constant difference
        ("same difference", np.full(4, -0.2), {"same factor"}),
        ("same factor", loss(TOKENS * 2) - loss(TOKENS), {"same difference"}),
        ("same saving", loss(TOKENS + 2e5) - loss(TOKENS), set()),
    ],
)
def test_the_true_hypothesis_predicts_the_largest_budget(
    hypothesis: str, differences: np.ndarray, others_inside: set[str]
) -> None:
    predictions = {each.hypothesis: each for each in predict_largest(points(differences))}
    assert predictions[hypothesis].difference == pytest.approx(differences[-1], abs=1e-3)
    assert {name for name, each in predictions.items() if each.is_inside} == {hypothesis} | others_inside


def test_too_few_budgets_predict_nothing() -> None:
    assert predict_largest(points(np.full(4, -0.2))[:2]) == []


@pytest.mark.parametrize("factor", [0.7, 1.0, 1.5])
def test_token_factor_of_a_faster_learner(factor: float) -> None:
    differences = loss(TOKENS * factor) - loss(TOKENS)
    measured = points(differences)
    mean, low, high = token_factors(measured, measured[1])
    assert mean == pytest.approx(factor, rel=1e-6)
    assert low < mean < high
    assert np.log(high / mean) == pytest.approx(np.log(mean / low), rel=1e-6)  # linear in log t
