"""Differential scoring after equal tokens and equal FLOPs: the stored studies share what the table says."""

from __future__ import annotations

import pytest

from qkflow.papers.claims import Results, find_arm, judged_difference
from qkflow.papers.coupled_dynamics.arms import FIXED_DIFFERENTIAL, REFERENCE
from qkflow.papers.coupled_dynamics.equal_cost import STUDIES, equal_cost_rows

STEP_TOKENS = 16 * 128


@pytest.fixture(scope="module")
def results() -> Results:
    return Results()


def test_the_reference_has_the_same_runs_in_both_studies(results: Results) -> None:
    losses = [find_arm(results.comparison(name), REFERENCE).losses for name in STUDIES]
    assert losses[0] == losses[1]
    assert len(losses[0]) >= 5


def test_equal_flops(results: Results) -> None:
    comparison = results.comparison("flops-4M")
    arm, reference = (find_arm(comparison, name).cost for name in (FIXED_DIFFERENTIAL, REFERENCE))
    assert arm.flops
    assert arm.tokens
    per_step = arm.flops / arm.tokens * STEP_TOKENS
    assert arm.flops == pytest.approx(reference.flops, abs=per_step)  # whole steps


def test_rows(results: Results) -> None:
    rows = equal_cost_rows(results)
    assert [row["compared after equal"] for row in rows] == ["tokens", "flops"]
    for row, name in zip(rows, STUDIES, strict=True):
        assert row["verdict"] == judged_difference(results.comparison(name), FIXED_DIFFERENTIAL)[1]
        assert row["tokens, standard"] == "4M"
    assert rows[0]["tokens, differential"] == "4M"
    assert rows[1]["tokens, differential"] != "4M"
