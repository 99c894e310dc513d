"""Verdicts from losses we choose ourselves: what is chosen, paired, corrected and said."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from qkflow.studies.analysis import RunData, analyze
from qkflow.studies.grid import ComparisonConfig, build_grid

ASK = ComparisonConfig(variants=("standard", "euler"), controls=("symmetric",), tokens=2048 * 100)
NOISE = (0.0, 0.002, -0.001)  # of a pair, so that intervals have a width
SEEDS = (0.0, 0.05, -0.04)  # shared by all runs of a seed


def study(question: ComparisonConfig) -> dict[str, Any]:
    grid = build_grid(question)
    arms = [one.to_dict() for one in grid.arms]
    return {"config": question.to_dict(), "command": "qkflow compare", "arms": arms}


def run(cell: str, seed: int, loss: float, **more: Any) -> RunData:
    """A finished run whose loss fell in a straight line from 8, with a row every tenth of the way."""
    step_seconds = more.pop("step_seconds", 0.1)
    evals = [
        {"step": s, "tokens": s * 2048, "seconds": s * step_seconds, "loss": 8 + (loss - 8) * s / 100}
        for s in range(0, 101, 10)
    ]
    result = {
        "status": "finished",
        "loss": loss,
        "tokens": 204800,
        "seconds": 100 * step_seconds,
        "step_seconds": step_seconds,
        "flops_per_token": 10.0,
        "environment": {"commit": more.pop("commit", "abc")},
        **more,
    }
    # half of the time something else had the core
    logged = [{"tokens_per_second": 2048 / step_seconds / (1 + s % 2)} for s in range(40)]
    metrics = {"eval": evals, "train": logged}
    return RunData(f"{cell}.{seed}", "compare", cell, seed, 3e-3, 204800, result, metrics)


def summary(final: dict[str, float | list[float]], question: ComparisonConfig = ASK) -> dict[str, Any]:
    """Analyse a study in which each cell ends at the given loss (plus what its seeds add)."""
    runs = []
    for i, (cell, loss) in enumerate(final.items()):
        for seed in range(question.seeds):
            value = loss[seed] if isinstance(loss, list) else loss + SEEDS[seed] + NOISE[(seed + i) % 3]
            runs.append(run(cell, seed, value))
    found = analyze(study(question), runs)
    json.dumps(found, allow_nan=False)
    return found


def row(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in found["variants"] if row["variant"] == name)


STANDARD = {"standard@gpt2": 4.0, "standard@fan_in": 4.3}
SYMMETRIC = {"standard@gpt2+symmetric=1": 4.0, "standard@fan_in+symmetric=1": 4.1}


def test_a_gain_over_a_badly_started_baseline_is_no_gain() -> None:
    found = summary({**STANDARD, "euler@gpt2": 4.001, "euler@fan_in": 4.2, **SYMMETRIC})
    euler = row(found, "euler")
    assert found["reference"]["best_init"] == "gpt2"
    assert euler["best_init"] == "gpt2"
    assert euler["verdict"] == "no evidence"
    same = {one["init"]: one["same_init_difference"]["percent"]["mean"] for one in euler["by_init"]}
    assert same["fan_in"] == pytest.approx(100 * math.expm1(-0.1), abs=0.3)
    assert same["gpt2"] == pytest.approx(0.1, abs=0.3)


def test_helps_with_its_interval_its_costs_and_its_controls() -> None:
    found = summary({**STANDARD, "euler@gpt2": 3.9, "euler@fan_in": 4.2, **SYMMETRIC})
    euler = row(found, "euler")
    assert euler["verdict"] == "helps"
    assert euler["difference"]["percent"]["mean"] == pytest.approx(-9.5, abs=0.3)
    assert euler["difference"]["low"] < -0.1 + 0.01 < euler["difference"]["high"] + 0.02
    # Straight lines from 8 to 3.9 and to 4.0: the target is reached after 4/4.1 of the way.
    assert euler["tokens_to_target"] == pytest.approx(4.0 / 4.1, abs=2e-3)
    assert euler["seconds_to_target"] == pytest.approx(4.0 / 4.1, abs=2e-3)
    assert euler["against_controls"]["symmetric"]["verdict"] == "helps"
    for words in (
        "euler helps",
        "9.5% lower",
        "95% interval",
        "3 paired seeds",
        "It also beats the control symmetric",
    ):
        assert words in euler["sentence"]


def test_a_gain_that_the_free_start_has_too_is_called_that() -> None:
    free = {"standard@fan_in+symmetric=1": 3.901, "standard@gpt2+symmetric=1": 4.0}
    euler = row(summary({**STANDARD, "euler@gpt2": 3.9, "euler@fan_in": 4.2, **free}), "euler")
    assert euler["verdict"] == "helps"
    assert "symmetric start alone, which is free, does as well" in euler["sentence"]
    better = {**free, "standard@fan_in+symmetric=1": 3.7}
    euler = row(summary({**STANDARD, "euler@gpt2": 3.9, "euler@fan_in": 4.2, **better}), "euler")
    assert "does better still" in euler["sentence"]


def test_hurts() -> None:
    euler = row(summary({**STANDARD, "euler@gpt2": 4.05, "euler@fan_in": 4.4, **SYMMETRIC}), "euler")
    assert euler["verdict"] == "hurts"
    assert "euler hurts: its perplexity is 5.1% higher" in euler["sentence"]
    assert euler["tokens_to_target"] is None


def test_verdicts_are_corrected_for_all_that_are_judged() -> None:
    question = replace(ASK, variants=("standard", "euler", "drift", "affine", "uncoupled"))
    # Alone, euler's p is about 0.03; among five it is not enough.
    euler = [4.0 - 0.02, 4.05 - 0.03, 3.96 - 0.035]
    others = {
        f"{name}@{start}": 4.31 for name in ("drift", "affine", "uncoupled") for start in ("gpt2", "fan_in")
    }
    others |= {
        "drift@gpt2": [4.0, 4.06, 3.95],
        "affine@gpt2": [4.01, 4.04, 3.96],
        "uncoupled@gpt2": [4.0, 4.04, 3.97],
    }  # type: ignore[dict-item]
    found = summary(
        {"standard@gpt2": [4.0, 4.05, 3.96], "standard@fan_in": 4.3, "euler@gpt2": euler, "euler@fan_in": 4.3,
         **others, **SYMMETRIC}, question)  # fmt: skip
    judged = row(found, "euler")
    assert judged["difference"]["p"] < 0.05 < judged["difference"]["p_holm"]
    assert judged["verdict"] == "no evidence"
    assert "too little for so many comparisons" in judged["sentence"]


def test_choosing_the_start_on_the_judged_seeds_is_checked() -> None:
    stable = row(summary({**STANDARD, "euler@gpt2": 3.9, "euler@fan_in": 4.2, **SYMMETRIC}), "euler")
    assert stable["choice_of_init"]["stable"]
    assert stable["choice_of_init"]["difference"]["mean"] == stable["difference"]["mean"]
    # Each of euler's starts is lucky on another seed: what the others choose is worse on the one left out.
    torn = summary({**STANDARD, "euler@gpt2": [3.8, 4.2, 4.0], "euler@fan_in": [4.2, 3.8, 4.01], **SYMMETRIC})
    euler = row(torn, "euler")
    assert not euler["choice_of_init"]["stable"]
    assert euler["choice_of_init"]["difference"]["mean"] > euler["difference"]["mean"]
    assert any("depends on the seeds for euler" in note for note in torn["notes"])


def test_a_cell_that_lost_a_seed_never_beats_one_that_kept_all() -> None:
    runs = [run(cell, seed, 4.0 + SEEDS[seed] + NOISE[seed]) for cell in STANDARD for seed in range(3)]
    runs += [run("euler@gpt2", seed, 4.1 + SEEDS[seed]) for seed in range(3)]
    runs += [run("euler@fan_in", seed, 3.0) for seed in range(2)]
    diverged = run("euler@fan_in", 2, math.nan)
    failed = replace(run("standard@gpt2", 2, 0.0), result={"status": "failed", "error": "loss is not finite"})
    runs += [diverged]
    runs = [failed if (one.cell, one.seed) == ("standard@gpt2", 2) else one for one in runs]
    found = analyze(study(replace(ASK, controls=())), runs)
    assert row(found, "euler")["best_init"] == "gpt2"
    assert found["reference"]["best_init"] == "fan_in"
    assert found["runs"]["finished"] == 10
    assert [one["cell"] for one in found["runs"]["failed"]] == ["standard@gpt2", "euler@fan_in"]
    assert any("standard@gpt2 seed 2: loss is not finite" in note for note in found["notes"])


def test_too_few_pairs_give_no_verdict_and_no_runs_no_reference() -> None:
    runs = [run(cell, seed, 4.0 + NOISE[seed]) for cell in STANDARD for seed in range(3)]
    runs += [run("euler@gpt2", seed, 3.0) for seed in range(2)]
    unfinished = RunData("x", "compare", "euler@gpt2", 2, 3e-3, 204800, None, {})
    found = analyze(study(replace(ASK, controls=())), [*runs, unfinished])
    assert row(found, "euler")["verdict"] == "no verdict"
    assert any("not complete: 1 of 9" in note for note in found["notes"])
    empty = analyze(study(ASK), [])
    assert empty["reference"] is None
    assert "nothing to compare with" in empty["headline"]


def test_the_symmetric_start_as_the_reference_itself() -> None:
    question = replace(ASK, inits=("fan_in", "fan_in+symmetric=1"), variants=("euler",))
    final = {"standard@fan_in": 4.3, "standard@fan_in+symmetric=1": 4.0, "euler@fan_in": 4.2,
             "euler@fan_in+symmetric=1": 4.0}  # fmt: skip
    found = summary(final, question)  # type: ignore[arg-type]
    assert found["reference"]["best_init"] == "fan_in+symmetric=1"
    assert row(found, "symmetric")["verdict"] == "reference"
    assert row(found, "euler")["verdict"] == "no evidence"


def test_ratios_and_mixed_commits() -> None:
    runs = [run("standard@gpt2", seed, 4.0 + SEEDS[seed]) for seed in range(3)]
    runs += [run("euler@gpt2", s, 3.9 + 2 * SEEDS[s], step_seconds=0.12, commit="def") for s in range(3)]
    runs += [run("standard@gpt2+symmetric=1", s, 4.0, step_seconds=0.3) for s in range(3)]
    question = replace(ASK, inits=("gpt2",), controls=("symmetric",))
    found = analyze(study(question), runs)
    euler = row(found, "euler")
    assert row(found, "symmetric")["step_time_ratio"] == 1  # the same model, on a busy machine
    assert euler["step_time_ratio"] == pytest.approx(1.2)
    assert euler["seed_variance_ratio"]["ratio"] == pytest.approx(4)
    assert euler["seconds_to_target"] == pytest.approx(1.2 * euler["tokens_to_target"])
    assert euler["flops"] == 10 * 204800
    assert found["environment"]["commit"] == ["abc", "def"]
    assert "The runs were made by different commits of the code." in found["notes"]


def test_without_a_verdict_numbers_alone() -> None:
    question = replace(ASK, seeds=1, verdict=False, controls=())
    found = summary({**STANDARD, "euler@gpt2": 3.9, "euler@fan_in": 4.2}, question)
    euler = row(found, "euler")
    assert euler["verdict"] == "no verdict"
    assert euler["difference"]["low"] is None
    assert "no verdict from one seed; its perplexity was 9.6% lower" in euler["sentence"]
