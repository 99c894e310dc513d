"""Contrasts of the ingredients study."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qkflow.papers.claims import Results, find_arm, judge_pairs
from qkflow.papers.coupled_dynamics import contrasts
from qkflow.papers.coupled_dynamics.contrasts import GROUPS, contrast_rows, init_by_coupling_rows
from qkflow.studies import compare, save_record
from qkflow.studies.design import Verdict
from toy_study import SMALL_GRID, TOY


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder: Path = tmp_path_factory.mktemp("results")
    compare("toy text", variants="standard,euler,drift", out=folder / "study", **SMALL_GRID, **TOY)
    for name in {group.study for group in GROUPS}:
        save_record(folder / "study", folder / f"{name}.json")
    return Results(folder)


def test_pairs_are_corrected_together(toy: Results) -> None:
    comparison = toy.comparison(contrasts.STUDY)
    alone = judge_pairs(comparison, [("euler", "standard")])["euler", "standard"]
    assert alone[1] == Verdict.HELPS
    losses = [find_arm(comparison, name).losses for name in ("euler", "standard")]
    assert alone[0].mean == pytest.approx(np.mean([losses[0][seed] - losses[1][seed] for seed in losses[0]]))
    many = judge_pairs(comparison, [("euler", "standard"), ("standard", "standard"), ("euler", "euler")])
    assert many["euler", "standard"][0] == alone[0]
    assert many["euler", "euler"][1] != Verdict.HELPS


def test_arms_that_are_not_in_the_study_are_not_run(toy: Results) -> None:
    assert {row["verdict"] for row in contrast_rows(toy)} == {"not run"}
    assert all(row["standard"] == "not run" for row in init_by_coupling_rows(toy))


def test_contrasts_of_the_stored_study() -> None:
    rows = contrast_rows(Results())
    assert len(rows) == sum(len(group.contrasts) for group in GROUPS)
    verdicts = {(row["on"], row["ingredient"]): row["verdict"] for row in rows}
    assert verdicts["AdamW, fan_in", "symmetric init, W_Q + W_K"] == "helps"
    assert verdicts["AdamW, fan_in", "networks on q and k, uncoupled"] in ("undecided", "equivalent")
