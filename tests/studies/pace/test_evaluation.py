"""Evaluation of a task model."""

from __future__ import annotations

import pytest

from qkflow.measures.faithfulness import Text, measure_faithfulness, measure_faithfulness_reference
from qkflow.studies.pace.dataset import TaskData
from toy_task import small_model


def test_batched_faithfulness_matches_reference(agreement: TaskData) -> None:
    model = small_model(agreement)
    texts = [Text(item.name, item.ids, item.rationales) for item in agreement.test[:8]]
    for method in ("attention", "rollout", "gradient"):
        batched = measure_faithfulness(model, texts, method)
        reference = measure_faithfulness_reference(model, texts, method)
        assert batched.mass == pytest.approx(reference.mass, rel=1e-3, abs=1e-5)
        assert batched.comprehensiveness[5.0] == pytest.approx(reference.comprehensiveness[5.0], abs=1e-5)
