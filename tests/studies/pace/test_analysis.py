"""Analysis of a pace study from results on disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qkflow.studies.pace import PaceStudyConfig, PaceSummary
from qkflow.studies.pace.analysis import analyze
from qkflow.studies.pace.results import RunResult, StudyFacts
from qkflow.studies.runner.study_dir import StudyDir
from qkflow.studies.stats import paired_difference


def fake_result(mass: float, performance: float, seed: int) -> RunResult:
    wobble = 0.01 * seed
    deleted = {
        "comprehensiveness": {"5": mass},
        "sufficiency": {"5": 0.1},
        "aopc_comprehensiveness": mass,
        "aopc_sufficiency": 0.1,
    }
    random = {**deleted, "aopc_comprehensiveness": 0.05 + wobble}
    return RunResult(
        performance=performance + 3 * wobble * (-1) ** seed,
        accuracy=performance,
        loss=1.0,
        mass=mass + wobble,
        confidence=None,
        without_rationale=0,
        measured=1,
        faithfulness={**dict.fromkeys(("attention", "rollout", "gradient"), deleted), "random": random},
        heatmap=None,
        circuits={"qk_scale": 1.0, "ov_scale": 1.0},
        steps=1,
        parameters=1,
        seconds=1.0,
        measure_seconds=1.0,
        environment={},
    )


def analyze_fake(folder: Path, results: dict[str, list[dict[str, Any]]], **config: Any) -> PaceSummary:
    """Analyze a study folder that contains these results, by ratio and seed."""
    runs = []
    for ratio, by_seed in results.items():
        for seed, result in enumerate(by_seed):
            name = f"r{ratio}.s{seed}"
            (folder / "runs" / name).mkdir(parents=True)
            (folder / "runs" / name / "result.json").write_text(json.dumps(result))
            run = {"id": name, "phase": "pace", "cell": f"r={ratio}", "seed": seed, "lr": 1e-3, "tokens": 1}
            runs.append(run)
    study_config = PaceStudyConfig("agreement", **config)
    facts = StudyFacts(steps=1, train=1, test=1, majority=0.5, vocab_size=3, notes={})
    study = {
        "config": study_config.to_dict(),
        "command": "",
        "recipe": study_config.resolve_recipe().to_dict(),
        "facts": vars(facts),
        "runs": runs,
        "arms": list(results),
    }
    return analyze(StudyDir(folder), study)


def faster_attention(seeds: int = 3) -> dict[str, list[dict[str, Any]]]:
    """Results with mass 0.2 at r = 1 and about 0.6 at r = 10."""
    return {
        ratio: [
            fake_result(mass + 0.001 * seed**2 * (ratio == "10"), 0.9, seed).to_dict()
            for seed in range(seeds)
        ]
        for ratio, mass in (("1", 0.2), ("10", 0.6))
    }


def test_verdicts_follow_the_paired_differences(tmp_path: Path) -> None:
    summary = analyze_fake(tmp_path, faster_attention())
    base, faster = summary.rows
    assert base.measures["mass"].difference is None
    assert "difference" not in base.to_dict()["measures"]["mass"]
    assert faster.measures["mass"].verdict == "raises"
    assert faster.measures["mass"].difference is not None
    assert faster.measures["mass"].difference.mean == pytest.approx(0.4, abs=0.01)
    assert faster.measures["performance"].verdict == "no evidence"
    assert "confidence" not in faster.measures, "AC was not measured"
    assert any("raises attention on the rationale by 0.40" in sentence for sentence in faster.sentences)
    contrast = summary.explains[1].to_dict()["attention_random"]
    assert contrast["mean"] == pytest.approx(0.54, abs=0.01)


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_intervals_have_the_confidence_of_the_config(tmp_path: Path, confidence: float) -> None:
    results = faster_attention()
    summary = analyze_fake(tmp_path, results, confidence=confidence)
    masses = [[result["mass"] for result in results[ratio]] for ratio in ("10", "1")]
    expected = paired_difference(*masses, confidence=confidence)
    difference = summary.rows[1].measures["mass"].difference
    assert difference is not None
    assert (difference.low, difference.high) == (expected.low, expected.high)
    interval = f"{100 * confidence:g}% interval {expected.low:+.3f} to {expected.high:+.3f}"
    assert interval in summary.rows[1].sentences[0]
    contrast = summary.explains[1].differences["attention_random"]
    attention, random = (
        [result["faithfulness"][method]["aopc_comprehensiveness"] for result in results["10"]]
        for method in ("attention", "random")
    )
    assert contrast == paired_difference(attention, random, confidence)


def test_two_seeds_give_no_verdict(tmp_path: Path) -> None:
    results = {ratio: [fake_result(0.2, 0.9, seed).to_dict() for seed in range(2)] for ratio in ("1", "3")}
    summary = analyze_fake(tmp_path, results, seeds=2)
    assert summary.rows[1].measures["mass"].verdict == "no verdict"
    assert any("at least 3 seeds" in note for note in summary.notes)


def test_failed_runs_are_reported(tmp_path: Path) -> None:
    results = faster_attention()
    results["10"][2] = {"status": "failed", "error": "NaN loss"}
    summary = analyze_fake(tmp_path, results)
    assert summary.to_dict()["runs"] == {
        "planned": 6,
        "finished": 5,
        "failures": [{"ratio": "r=10", "seed": 2, "error": "NaN loss"}],
    }
    assert any("r=10 seed 2 failed: NaN loss" in note for note in summary.notes)
    assert summary.rows[1].seeds == [0, 1]


def test_baseline_at_majority_accuracy_is_noted(tmp_path: Path) -> None:
    results = {"1": [replace(fake_result(0.2, 0.5, 0)).to_dict()]}
    assert any("most frequent class" in note for note in analyze_fake(tmp_path, results, seeds=1).notes)
