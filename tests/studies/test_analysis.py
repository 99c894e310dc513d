"""Summaries and verdicts of runs with known losses."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from qkflow.studies.analysis import analyze
from qkflow.studies.config import ComparisonConfig
from qkflow.studies.grid import build_grid
from qkflow.studies.plan import StudyPlan
from qkflow.studies.results import ArmSummary, StudySummary
from qkflow.studies.run_data import RunData

CONFIG = ComparisonConfig(
    variants=("standard", "euler"),
    controls=("symmetric",),
    tokens=2048 * 100,
    seeds=3,
    inits=("gpt2", "fan_in"),
)
NOISE = (0.0, 0.002, -0.001)  # of a pair, so that intervals have a width
SEEDS = (0.0, 0.05, -0.04)  # shared by all runs of a seed


def make_plan(config: ComparisonConfig) -> StudyPlan:
    arms = tuple(arm.plan() for arm in build_grid(config).arms)
    return StudyPlan(config, "qkflow compare", arms, budgets={}, jobs=1, runs=())


def make_run(cell: str, seed: int, loss: float, **more: Any) -> RunData:
    """Return a finished run whose loss decreased linearly from 8, evaluated ten times."""
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
    # half of the time another process used the CPU core
    speeds = [{"tokens_per_second": 2048 / step_seconds / (1 + s % 2)} for s in range(40)]
    metrics = {"eval": evals, "train": speeds}
    return RunData(f"{cell}.{seed}", "compare", cell, seed, 3e-3, 204800, result, metrics)


def summarize(
    final_losses: dict[str, float | list[float]], config: ComparisonConfig = CONFIG
) -> StudySummary:
    """Analyze a study in which each cell ends at the given loss plus noise, or at the given loss per seed."""
    runs = []
    for i, (cell, loss) in enumerate(final_losses.items()):
        for seed in range(config.n_seeds):
            value = loss[seed] if isinstance(loss, list) else loss + SEEDS[seed] + NOISE[(seed + i) % 3]
            runs.append(make_run(cell, seed, value))
    summary = analyze(make_plan(config), runs)
    assert StudySummary.from_dict(json.loads(json.dumps(summary.to_dict(), allow_nan=False))) == summary
    return summary


def get_arm(summary: StudySummary, name: str) -> ArmSummary:
    return next(arm for arm in summary.variants if arm.variant == name)


STANDARD: dict[str, float | list[float]] = {"standard@gpt2": 4.0, "standard@fan_in": 4.3}
SYMMETRIC: dict[str, float | list[float]] = {
    "standard@gpt2+symmetric=1": 4.0,
    "standard@fan_in+symmetric=1": 4.1,
}


def test_gain_over_a_badly_initialized_baseline_does_not_count() -> None:
    summary = summarize({**STANDARD, "euler@gpt2": 4.001, "euler@fan_in": 4.2, **SYMMETRIC})
    euler = get_arm(summary, "euler")
    assert summary.reference.best_init == "gpt2"
    assert euler.best_init == "gpt2"
    assert euler.verdict == "equivalent"
    assert "euler is equivalent within 1%" in euler.sentence
    differences = {init.init: init.same_init_difference for init in euler.by_init}
    same = {init: difference.percent["mean"] for init, difference in differences.items() if difference}
    assert same["fan_in"] == pytest.approx(100 * math.expm1(-0.1), abs=0.3)
    assert same["gpt2"] == pytest.approx(0.1, abs=0.3)


def test_helps_with_interval_cost_and_controls() -> None:
    summary = summarize({**STANDARD, "euler@gpt2": 3.9, "euler@fan_in": 4.2, **SYMMETRIC})
    euler = get_arm(summary, "euler")
    assert euler.verdict == "helps"
    assert euler.difference.percent["mean"] == pytest.approx(-9.5, abs=0.3)
    assert euler.difference.low < -0.1 + 0.01 < euler.difference.high + 0.02
    # straight lines from 8 to 3.9 and to 4.0: the target is reached after 4/4.1 of the tokens
    assert euler.cost.tokens_to_target == pytest.approx(4.0 / 4.1, abs=2e-3)
    assert euler.cost.seconds_to_target == pytest.approx(4.0 / 4.1, abs=2e-3)
    assert euler.against_controls["symmetric"].verdict == "helps"
    for words in (
        "euler helps",
        "9.5% lower",
        "95% interval",
        "3 paired seeds",
        "It also beats the control symmetric",
    ):
        assert words in euler.sentence


def test_gain_that_a_control_also_has() -> None:
    free: dict[str, float | list[float]] = {
        "standard@fan_in+symmetric=1": 3.901,
        "standard@gpt2+symmetric=1": 4.0,
    }
    euler = get_arm(summarize({**STANDARD, "euler@gpt2": 3.9, "euler@fan_in": 4.2, **free}), "euler")
    assert euler.verdict == "helps"
    assert "symmetric init alone, which is free, is not inferior to it within 1%" in euler.sentence
    assert euler.against_controls["symmetric"].p_noninferior < 0.05
    better: dict[str, float | list[float]] = {**free, "standard@fan_in+symmetric=1": 3.7}
    euler = get_arm(summarize({**STANDARD, "euler@gpt2": 3.9, "euler@fan_in": 4.2, **better}), "euler")
    assert "does better still" in euler.sentence


def test_hurts() -> None:
    euler = get_arm(summarize({**STANDARD, "euler@gpt2": 4.05, "euler@fan_in": 4.4, **SYMMETRIC}), "euler")
    assert euler.verdict == "hurts"
    assert "euler hurts: its perplexity is 5.1% higher" in euler.sentence
    assert euler.cost.tokens_to_target is None


def test_verdicts_are_corrected_for_all_tests() -> None:
    config = replace(CONFIG, variants=("standard", "euler", "drift", "affine", "uncoupled"))
    # on its own, euler's p is about 0.03; with five tests it is not significant
    euler = [4.0 - 0.02, 4.05 - 0.03, 3.96 - 0.035]
    others: dict[str, float | list[float]] = {
        f"{name}@{init}": 4.31 for name in ("drift", "affine", "uncoupled") for init in ("gpt2", "fan_in")
    }
    others |= {
        "drift@gpt2": [4.0, 4.06, 3.95],
        "affine@gpt2": [4.01, 4.04, 3.96],
        "uncoupled@gpt2": [4.0, 4.04, 3.97],
    }
    summary = summarize(
        {"standard@gpt2": [4.0, 4.05, 3.96], "standard@fan_in": 4.3, "euler@gpt2": euler, "euler@fan_in": 4.3,
         **others, **SYMMETRIC}, config)  # fmt: skip
    judged = get_arm(summary, "euler")
    assert judged.difference is not None
    assert judged.difference.p < 0.05 < judged.p_holm
    assert judged.verdict == "undecided"
    assert judged.seeds_to_decide is not None
    assert f"a new study with {judged.seeds_to_decide} seeds" in judged.sentence


def test_diverged_seed_disqualifies_an_init() -> None:
    runs = [make_run(cell, seed, 4.0 + SEEDS[seed] + NOISE[seed]) for cell in STANDARD for seed in range(3)]
    runs += [make_run("euler@gpt2", seed, 4.1 + SEEDS[seed]) for seed in range(3)]
    runs += [make_run("euler@fan_in", seed, 3.0) for seed in range(2)]
    diverged = make_run("euler@fan_in", 2, math.nan)
    failed = replace(
        make_run("standard@gpt2", 2, 0.0), result={"status": "failed", "error": "loss is not finite"}
    )
    runs += [diverged]
    runs = [failed if (one.cell, one.seed) == ("standard@gpt2", 2) else one for one in runs]
    summary = analyze(make_plan(replace(CONFIG, controls=())), runs)
    assert get_arm(summary, "euler").best_init == "gpt2"
    assert summary.reference.best_init == "fan_in"
    assert summary.runs.finished == 10
    assert [run.cell for run in summary.runs.failed] == ["standard@gpt2", "euler@fan_in"]
    assert any("standard@gpt2 seed 2: loss is not finite" in note for note in summary.notes)


def test_failed_judged_runs_block_helps_and_equivalent() -> None:
    config = replace(CONFIG, seeds=5, controls=(), inits=("gpt2",))
    runs = [make_run("standard@gpt2", seed, 4.0 + 0.01 * seed) for seed in range(5)]
    runs += [make_run("euler@gpt2", seed, 3.9 + 0.01 * seed + 1e-4 * seed**2) for seed in range(4)]
    failed = replace(make_run("euler@gpt2", 4, 0.0), result={"status": "failed", "error": "loss is NaN"})
    euler = get_arm(analyze(make_plan(config), [*runs, failed]), "euler")
    assert euler.verdict == "no verdict"
    assert "judged runs failed (seeds 4)" in euler.sentence
    finished = make_run("euler@gpt2", 4, 3.94)
    assert get_arm(analyze(make_plan(config), [*runs, finished]), "euler").verdict == "helps"
    # not finished yet: a fixed study is looked at once
    assert get_arm(analyze(make_plan(config), runs), "euler").verdict == "no verdict"


def test_arm_in_the_pool_is_not_tested() -> None:
    config = replace(CONFIG, inits=("gpt2", "gpt2+symmetric=1"), variants=("symmetric@gpt2",), controls=())
    losses: dict[str, float | list[float]] = {"standard@gpt2": 4.0, "standard@gpt2+symmetric=1": 4.001}
    assert get_arm(summarize(losses, config), "symmetric@gpt2").verdict == "reference"


def test_controls_are_beaten_only_with_all_their_inits() -> None:
    control: dict[str, float | list[float]] = {
        "standard@gpt2+symmetric=1": [3.95, 4.0, 3.91],
        "standard@fan_in+symmetric=1": [3.80, 4.4, 3.70],  # still in the race
    }
    euler = get_arm(summarize({**STANDARD, "euler@gpt2": 3.9, "euler@fan_in": 4.2, **control}), "euler")
    assert euler.against_controls["symmetric"].verdict != "helps"


def test_too_few_pairs_give_no_verdict_and_no_runs_no_reference() -> None:
    runs = [make_run(cell, seed, 4.0 + NOISE[seed]) for cell in STANDARD for seed in range(3)]
    runs += [make_run("euler@gpt2", seed, 3.0) for seed in range(2)]
    unfinished = RunData("x", "compare", "euler@gpt2", 2, 3e-3, 204800, None, {})
    summary = analyze(make_plan(replace(CONFIG, controls=())), [*runs, unfinished])
    assert get_arm(summary, "euler").verdict == "no verdict"
    assert any("not complete: 1 of 9" in note for note in summary.notes)
    empty = analyze(make_plan(CONFIG), [])
    assert empty.reference is None
    assert "nothing to compare with" in empty.headline


def test_symmetric_init_as_the_reference() -> None:
    config = replace(CONFIG, inits=("fan_in", "fan_in+symmetric=1"), variants=("euler",))
    final: dict[str, float | list[float]] = {
        "standard@fan_in": 4.3,
        "standard@fan_in+symmetric=1": 4.0,
        "euler@fan_in": 4.2,
        "euler@fan_in+symmetric=1": 4.0,
    }
    summary = summarize(final, config)
    assert summary.reference.best_init == "fan_in+symmetric=1"
    assert get_arm(summary, "symmetric").verdict == "reference"
    assert get_arm(summary, "euler").verdict == "equivalent"


def test_ratios_to_the_reference_and_mixed_commits() -> None:
    runs = [make_run("standard@gpt2", seed, 4.0 + SEEDS[seed]) for seed in range(3)]
    runs += [make_run("euler@gpt2", s, 3.9 + 2 * SEEDS[s], step_seconds=0.12, commit="def") for s in range(3)]
    runs += [make_run("standard@gpt2+symmetric=1", s, 4.0, step_seconds=0.3) for s in range(3)]
    config = replace(CONFIG, inits=("gpt2",), controls=("symmetric",))
    summary = analyze(make_plan(config), runs)
    euler = get_arm(summary, "euler")
    assert get_arm(summary, "symmetric").cost.step_time_ratio == 1  # the same model, on a busy machine
    assert euler.cost.step_time_ratio == pytest.approx(1.2)
    assert euler.seed_variance_ratio.ratio == pytest.approx(4)
    assert euler.cost.seconds_to_target == pytest.approx(1.2 * euler.cost.tokens_to_target)
    assert euler.cost.flops == 10 * 204800
    assert summary.environment["commit"] == ["abc", "def"]
    assert "The runs were made by different commits of the code." in summary.notes


def test_no_verdict_reports_numbers_alone() -> None:
    config = replace(CONFIG, seeds=1, verdict=False, controls=())
    summary = summarize({**STANDARD, "euler@gpt2": 3.9, "euler@fan_in": 4.2}, config)
    euler = get_arm(summary, "euler")
    assert euler.verdict == "no verdict"
    assert euler.difference.low is None
    assert "no verdict from one seed; its perplexity was 9.6% lower" in euler.sentence
    assert not any("t-interval" in note for note in summary.notes)  # one seed has no interval


def test_target_is_the_end_of_the_reference_curve() -> None:
    """The final loss is measured on more tokens than the curve, and must not shift the target."""
    losses = {**STANDARD, "euler@gpt2": 3.9, "euler@fan_in": 4.2, **SYMMETRIC}
    runs = [make_run(cell, seed, float(loss)) for cell, loss in losses.items() for seed in range(3)]  # type: ignore[arg-type]
    for run in runs:
        assert run.result is not None
        run.result["loss"] += 0.5
    euler = get_arm(analyze(make_plan(CONFIG), runs), "euler")
    assert euler.loss == pytest.approx(4.4)
    assert euler.cost.tokens_to_target == pytest.approx(4.0 / 4.1, abs=2e-3)
