from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from qkflow.studies.blocked import BlockedDifference
from qkflow.studies.config import ComparisonConfig
from qkflow.studies.design import Verdict
from qkflow.studies.results import (
    AddedArm,
    ArmSummary,
    ControlDifference,
    CorrectedDifference,
    Cost,
    FailedRun,
    InitSummary,
    LrSearch,
    LrTrial,
    NoiseFloor,
    Power,
    RunCounts,
    StudySummary,
)
from qkflow.studies.stats import PairedDifference, VarianceRatio

NUMBERS = {"mean": -0.1, "low": -0.2, "high": 0.0, "bootstrap_low": -0.15, "bootstrap_high": -0.05, "p": 0.04}
TESTS = {"sd": 0.1, "direction": -1, "p_equivalent": 0.5}
PAIRED = {*NUMBERS, *TESTS, "pairs", "percent"}
PLAIN = PairedDifference(**NUMBERS, **TESTS, pairs=3)
CORRECTED = CorrectedDifference(**NUMBERS, **TESTS, pairs=3, p_holm=0.08, p_equivalent_holm=0.9)
CONTROL = ControlDifference(
    **NUMBERS,
    **TESTS,
    pairs=3,
    p_holm=0.08,
    verdict=Verdict.UNDECIDED,
    control_verdict=Verdict.HELPS,
    p_noninferior=0.2,
)
ARM = ArmSummary(
    variant="euler",
    role="variant",
    best_init="gpt2",
    cell="euler@gpt2",
    seeds=(0, 1, 2),
    lr=3e-3,
    loss=4.0,
    loss_by_seed=(3.9, 4.0, 4.1),
    perplexity=math.exp(4.0),
    bits_per_byte=1.5,
    cost=Cost(tokens=1e5, flops=1e9, peak_memory_bytes=10, parameters=5, tokens_to_target=0.9),
    by_init=(InitSummary("gpt2", "euler@gpt2", "standard@gpt2", (0, 1, 2), 3e-3, 4.0, 54.6, PLAIN),),
    difference=CORRECTED,
    seed_variance_ratio=VarianceRatio(1.0, 0.1, 9.0),
    blocked=BlockedDifference(-0.1, -0.15, -0.05, 0.01, 0.02, 8, 5, 0.4),
    seeds_to_decide=9,
    verdict=Verdict.UNDECIDED,
    against_controls={"symmetric": CONTROL},
    sentence="euler: undecided.",
)
SUMMARY = StudySummary(
    config=ComparisonConfig(tokens=1000),
    command="qkflow compare",
    reference=ArmSummary("standard", "reference", "gpt2", "standard@gpt2", verdict=Verdict.REFERENCE),
    variants=(ARM,),
    runs=RunCounts(6, 5, (FailedRun("x", "euler@gpt2", 2, "loss is NaN"),)),
    noise_floor=NoiseFloor("standard@gpt2", PLAIN),
    power=Power(5, 3, 2.5, 0.02, "this study"),
    planned_at="2026-11-18T03:00:00+00:00",
    added_arms=(AddedArm("euler", "2026-11-18T04:00:00+00:00", 7),),
    learning_rates=(LrSearch("euler@gpt2", 3e-3, True, (LrTrial(3e-3, 4.0), LrTrial(6e-3, None))),),
    environment={"commit": ["a", "b"], "threads": 1},
    notes=("a note",),
    headline="On speeches: undecided.",
)


@pytest.mark.parametrize("summary", [SUMMARY, replace(SUMMARY, reference=None, variants=())])
def test_json_round_trip(summary: StudySummary) -> None:
    text = json.dumps(summary.to_dict(), allow_nan=False)
    assert json.loads(text) == summary.to_dict()
    assert StudySummary.from_dict(json.loads(text)) == summary


def test_summary_json_keys() -> None:
    values = SUMMARY.to_dict()
    assert set(values) == {
        "config", "command", "reference", "variants", "runs", "learning_rates", "environment", "commit",
        "notes", "headline", "metric", "noise_floor", "power", "detectable_percent", "planned_at",
        "added_arms", "finetune",
    }  # fmt: skip
    arm = values["variants"][0]
    assert set(arm) == {
        "variant", "role", "best_init", "cell", "seeds", "lr", "loss", "loss_by_seed", "failed_seeds",
        "perplexity", "bits_per_byte", "tokens", "flops", "seconds", "step_seconds", "peak_memory_bytes",
        "parameters", "tokens_to_target", "seconds_to_target", "step_time_ratio", "by_init", "difference",
        "seed_variance_ratio", "blocked", "seeds_to_decide", "verdict", "against_controls", "sentence",
    }  # fmt: skip
    assert set(arm["difference"]) == {*PAIRED, "p_holm", "p_equivalent_holm"}
    assert set(arm["by_init"][0]["same_init_difference"]) == PAIRED
    controls = arm["against_controls"]["symmetric"]
    corrected = {*PAIRED, "p_holm", "p_equivalent_holm"}
    assert set(controls) == {*corrected, "verdict", "control_verdict", "p_noninferior"}
    assert arm["verdict"] == "undecided"
    assert type(arm["verdict"]) is str


def test_overflowing_percentages_are_none() -> None:
    difference = replace(PLAIN, mean=900.0, high=1000.0)
    assert difference.percent["mean"] is None
    json.dumps(difference.to_dict(), allow_nan=False)


def test_row_of_an_arm_without_difference() -> None:
    row = SUMMARY.arms[0].to_row()
    assert row.keys() == ARM.to_row().keys()
    assert row["difference"] is row["p_holm"] is row["percent"] is None
