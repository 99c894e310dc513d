from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from input_errors import raises_code
from qkflow.studies.analysis import RunData
from qkflow.studies.config import ComparisonConfig
from qkflow.studies.finetune.analysis import chance_margin, format_points, judge_task, summarize_tasks
from qkflow.studies.finetune.metrics import METRICS
from qkflow.studies.finetune.results import TaskSummary
from qkflow.studies.results import ArmSummary, Verdict, _to_plain
from qkflow.studies.stats import holm_correction, paired_difference

BASE = {0: 0.60, 1: 0.64, 2: 0.62}
CONFIG = ComparisonConfig(finetune=("glue:MRPC",))
ARMS = [
    ArmSummary("standard", "reference", "gpt2", "standard@gpt2"),
    ArmSummary("euler", "variant", "fan_in", "euler@fan_in"),
    ArmSummary("symmetric", "control", "gpt2", "standard@gpt2"),
]


def shifted(*shifts: float) -> dict[int, float]:
    return {seed: BASE[seed] + shift for seed, shift in enumerate(shifts)}


def test_higher_scores_help() -> None:
    scores = {
        "standard": BASE,
        "good": shifted(0.050, 0.051, 0.049),
        "bad": shifted(-0.050, -0.051, -0.049),
        "noise": shifted(0.05, -0.04, 0.01),
    }
    reference, good, bad, noise = judge_task(scores, 0.95)
    assert reference.verdict == Verdict.REFERENCE
    assert reference.score == pytest.approx(62)
    assert [arm.verdict for arm in (good, bad, noise)] == [Verdict.HELPS, Verdict.HURTS, Verdict.UNDECIDED]
    assert good.difference is not None
    assert good.difference.mean == pytest.approx(5.0)
    assert good.difference.low is not None
    assert good.difference.high is not None
    assert 0 < good.difference.low < 5 < good.difference.high
    assert bad.score_by_seed == pytest.approx((55.0, 58.9, 57.1))


def test_p_values_are_corrected_within_the_task() -> None:
    scores = {"standard": BASE, "a": shifted(0.01, 0.02, 0.03), "b": shifted(0.02, 0.02, 0.03)}
    _, a, b = judge_task(scores, 0.95)
    p_values = [paired_difference(list(scores[name].values()), list(BASE.values())).p for name in ("a", "b")]
    assert a.difference is not None
    assert b.difference is not None
    assert [a.difference.p_holm, b.difference.p_holm] == pytest.approx(holm_correction(p_values))


def test_equal_differences_have_no_spread_to_test() -> None:
    _, same, shift = judge_task({"standard": BASE, "same": BASE, "shift": shifted(0.25, 0.25, 0.25)}, 0.95)
    assert same.verdict == Verdict.EQUIVALENT
    assert shift.verdict == Verdict.NO_VERDICT
    assert shift.difference is not None
    assert shift.difference.mean == pytest.approx(25)


def test_only_common_seeds_are_compared() -> None:
    _, part, none = judge_task({"standard": BASE, "part": {2: 0.7, 5: 0.1}, "none": {}}, 0.95)
    assert part.difference is not None
    assert (part.difference.pairs, part.difference.low, part.verdict) == (1, None, Verdict.NO_VERDICT)
    assert (none.difference, none.score, none.verdict) == (None, None, Verdict.NO_VERDICT)


def run(cell: str, seed: int, accuracy: float | None) -> RunData:
    result = {
        "status": "finished",
        "score": accuracy,
        "metrics": {"accuracy": accuracy, "f1": 0.8},
        "majority": {"accuracy": 0.684, "f1": 0.812},
        "train_examples": 3668,
        "validation_examples": 408,
    }
    failed = {"status": "failed", "error": "NonFiniteError: the loss is not finite"}
    values = failed if accuracy is None else result
    return RunData(f"{cell}{seed}", "finetune", f"{cell}/MRPC", seed, 1e-3, 10, values, {})


def summarize(config: ComparisonConfig = CONFIG, lost: int | None = None) -> TaskSummary:
    runs = [run("standard@gpt2", seed, 0.60 + 0.01 * seed) for seed in range(3)]
    runs += [run("euler@fan_in", seed, None if seed == lost else 0.70 + 0.0101 * seed) for seed in range(3)]
    runs += [run("euler@gpt2", 0, 0.1)]  # not the cell that language modeling chose
    (summary,) = summarize_tasks(config, runs, ARMS)
    return summary


def test_summary_of_a_task() -> None:
    summary = summarize()
    standard, euler, symmetric = summary.arms
    assert (summary.task, summary.metric, summary.majority) == ("glue:MRPC", "accuracy", 68.4)
    assert summary.other_metrics == ["f1"]
    assert euler.verdict == Verdict.HELPS
    assert euler.cell == "euler@fan_in"
    assert euler.metrics["f1"] == pytest.approx(80)
    assert (symmetric.verdict, symmetric.score) == (Verdict.REFERENCE, standard.score)
    assert summary.is_complete
    assert "euler helps, +10.0 points" in summary.sentence
    assert "does not clearly beat the majority class (two standard errors are 5.0 points)" in summary.sentence
    assert TaskSummary.from_dict(_to_plain(summary)) == summary
    assert [row["variant"] for row in summary.to_rows()] == ["standard", "euler", "symmetric"]


@pytest.mark.parametrize(("metric", "rng"), [("accuracy", 0), ("mcc", 1)])
def test_chance_margin_is_two_standard_errors_of_guesses(metric: str, rng: int) -> None:
    guesses = np.random.default_rng(rng).integers(0, 2, (500, 2, 300)).tolist()
    scores = [100 * METRICS[metric](labels, predictions) for labels, predictions in guesses]
    assert 2 * np.std(scores) == pytest.approx(chance_margin(metric, 300), rel=0.1)


@pytest.mark.parametrize(("value", "text"), [(-0.04, "+0.0"), (-1.26, "−1.3"), (0.5, "+0.5")])
def test_format_points(value: float, text: str) -> None:
    assert format_points(value) == text


def test_failed_runs_are_counted() -> None:
    summary = summarize(lost=1)
    assert (summary.runs.planned, summary.runs.finished) == (7, 6)
    assert [failed.seed for failed in summary.runs.failed] == [1]
    assert not summary.is_complete
    assert summary.arms[1].verdict == Verdict.NO_VERDICT
    assert "1 of 7 fine-tuning runs failed" in summary.sentence


def test_unfinished_runs_are_counted() -> None:
    runs = [run("standard@gpt2", 0, 0.7), replace(run("euler@fan_in", 0, None), result=None)]
    (summary,) = summarize_tasks(CONFIG, runs, ARMS)
    assert (summary.runs.planned, summary.runs.finished, summary.runs.failed) == (2, 1, ())
    assert "1 of 2 fine-tuning runs have not finished" in summary.sentence


def test_no_verdict_is_the_numbers_alone() -> None:
    euler = summarize(replace(CONFIG, verdict=False)).arms[1]
    assert euler.verdict == Verdict.NO_VERDICT
    assert euler.difference is not None


def test_nothing_finished() -> None:
    (summary,) = summarize_tasks(CONFIG, [], ARMS)
    assert summary.majority is None
    assert "no verdict" in summary.sentence


@pytest.mark.parametrize(
    "change", [{"score": None}, {"majority": {}}, {"metrics": [1]}, {"train_examples": "x"}]
)
def test_damaged_result_is_one_sentence(change: dict[str, Any]) -> None:
    metrics = {"f1": 0.5, "accuracy": 0.5}
    result = {"status": "finished", "score": 0.5, "metrics": metrics, "majority": metrics}
    result |= {"train_examples": 1, "validation_examples": 1, **change}
    run = RunData("a", "finetune", "standard@gpt2/MRPC", 0, 1e-3, 10, result, {})
    with raises_code("corrupt-result"):
        summarize_tasks(CONFIG, [run], ARMS)
