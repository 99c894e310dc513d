"""Evaluation of a task model."""

from __future__ import annotations

import numpy as np
import pytest

from qkflow.measures.faithfulness import Text, measure_faithfulness, measure_faithfulness_reference
from qkflow.studies.pace.dataset import TaskData
from qkflow.studies.pace.evaluation import heatmap
from toy_task import small_model


def test_batched_faithfulness_matches_reference(agreement: TaskData) -> None:
    model = small_model(agreement)
    texts = [Text(item.name, item.ids, item.rationales) for item in agreement.test[:8]]
    for method in ("attention", "rollout", "gradient"):
        batched = measure_faithfulness(model, texts, method)
        reference = measure_faithfulness_reference(model, texts, method)
        assert batched.mass == pytest.approx(reference.mass, rel=1e-3, abs=1e-5)
        assert batched.comprehensiveness[5.0] == pytest.approx(reference.comprehensiveness[5.0], abs=1e-5)


def test_heatmap_shares_sum_to_all_examples_with_a_rationale() -> None:
    shares = np.array(heatmap(np.array([0.1, 0.5, 1.0, np.nan]), np.array([0.9, 0.1, 1.0, 0.5])))
    assert shares.sum() == pytest.approx(100)
    assert shares[4, 4] == shares[0, 4] == shares[2, 0] == pytest.approx(100 / 3)
