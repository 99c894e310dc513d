"""Simulated studies: error rates within their simulation error. `qkflow calibrate` runs many more."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from input_errors import raises_code
from qkflow.cli.main import dispatch
from qkflow.studies.calibration import (
    NULL_SCENARIOS,
    DesignName,
    Scenario,
    calibrate,
    choose_leaders,
    effect_scenarios,
    judge_arms,
    runs_saved,
)
from qkflow.studies.design import SeedDesign
from qkflow.studies.screening import CellData, screen

ROOT = Path(__file__).parents[2]
STUDIES = 600
LIMIT = 0.05 + 3 * math.sqrt(0.05 * 0.95 / STUDIES)


@pytest.mark.parametrize("scenario", NULL_SCENARIOS, ids=lambda scenario: scenario.name)
@pytest.mark.parametrize(("design", "seeds"), [("fixed", 5), ("adaptive", 12)])
def test_false_verdicts_without_effect(scenario: Scenario, design: DesignName, seeds: int) -> None:
    row = calibrate(scenario, seeds, design, studies=STUDIES)
    assert row.false_verdicts <= LIMIT
    assert row.power is None


def test_effects_are_found_and_adaptive_studies_stop_early() -> None:
    large = Scenario("", effect=-0.1, all_arms=True)
    fixed, adaptive = (calibrate(large, 12, design, studies=200) for design in ("fixed", "adaptive"))
    assert fixed.power == adaptive.power == 1.0
    assert adaptive.mean_seeds < 6 < fixed.mean_seeds == 12
    assert adaptive.mean_runs < 0.7 * fixed.mean_runs
    weak = calibrate(effect_scenarios((0.5,))[0], 3, "fixed", studies=200)
    assert weak.power is not None
    assert weak.power < 0.2


def test_equivalence_is_not_claimed_outside_the_margin() -> None:
    at_margin = Scenario("", effect=math.log1p(0.0101), noise=(0.002,) * 3, all_arms=True)
    row = calibrate(at_margin, 8, "fixed", studies=STUDIES)
    assert row.false_equivalent <= LIMIT
    inside = calibrate(Scenario("", noise=(0.002,) * 3), 8, "fixed", studies=100)
    assert inside.undecided < 0.05


def test_simulated_p_values_are_those_of_a_real_study() -> None:
    """The same losses through the vectorized simulation and through the cells of a study."""
    losses = Scenario("", arms=2, init_gaps=(0.0, 0.004, 0.3)).draw(1, 3 + 6, np.random.default_rng(0))
    leaders, racing = choose_leaders(losses[..., :3], np.isfinite(losses[..., 0]))
    for design in (SeedDesign.fixed(margin=0.01), SeedDesign.adaptive(6, margin=0.01)):
        simulated = judge_arms(losses[..., 3:], leaders, racing, design)
        arms = [
            [
                CellData(f"{a}@{c}", str(c), screened=dict(enumerate(x[:3])), judged=dict(enumerate(x[3:])))
                for c, x in enumerate(cells)
            ]
            for a, cells in enumerate(losses[0])
        ]
        pool, *others = map(screen, arms)
        for arm, screening in enumerate(others):
            tested = screening.difference(pool, design)
            assert tested is not None
            assert tested.p == pytest.approx(simulated.p[0, arm, -1])
            assert tested.p_equivalent == pytest.approx(simulated.p_equivalent[0, arm, -1])
            assert tested.direction == simulated.direction[0, arm, -1]


def test_runs_saved() -> None:
    saving = runs_saved(studies=200).to_dict()
    assert saving["ratio"] >= 2
    assert saving["ratio_screened"] > 1.3


def test_calibrate_command(capsys: pytest.CaptureFixture[str]) -> None:
    dispatch(["calibrate", "--studies", "100", "--seeds", "3,5", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {"scenario", "seeds", "design", "false_verdicts", "power", "mean_runs"} <= rows[0].keys()
    assert {(row["design"], row["seeds"]) for row in rows} == {("fixed", 3), ("fixed", 5), ("adaptive", 5)}
    dispatch(["calibrate", "--saved", str(ROOT / "docs/results/calibration.json"), "--markdown"])
    text = capsys.readouterr().out
    assert "inits tied" in text
    assert "False helps or hurts: at most" in text


def test_stored_calibration_keeps_five_percent() -> None:
    stored = json.loads((ROOT / "docs/results/calibration.json").read_text())
    assert {row["scenario"] for row in stored["rows"]} >= {scenario.name for scenario in NULL_SCENARIOS}
    for row in stored["rows"]:
        assert row["studies"] >= 10_000
        assert row["false_verdicts"] <= 0.05 + 2 * row["standard_error"]
    assert stored["saving"]["ratio"] >= 2


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--studies", "1"], "below-minimum"),
        (["--seeds", "2"], "invalid-seeds"),
        (["--seeds", "x"], "invalid-seeds"),
        (["--margin", "0"], "below-minimum"),
        (["--saved", "nowhere.json"], "not-a-calibration"),
    ],
)
def test_calibrate_rejects(arguments: list[str], code: str) -> None:
    with raises_code(code):
        dispatch(["calibrate", *arguments])
