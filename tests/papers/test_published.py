"""The studies of the papers, with real worker processes (of a toy problem)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from input_errors import raises_code
from qkflow.papers.published import PAPER_STUDIES, reproduce
from qkflow.studies import Comparison
from qkflow.studies.analysis import RunData
from qkflow.studies.config import ComparisonConfig
from qkflow.studies.grid import build_grid
from qkflow.studies.results import ArmSummary, RunCounts, StudySummary
from qkflow.studies.slow_path_findings import gate_findings
from toy_study import TOY

SETTINGS = {name: value for name, value in TOY.items() if name != "controls"}


def test_stages_run_and_resume(tmp_path: Path) -> None:
    stages: list[str] = []
    settings: dict[str, Any] = {"data": "toy", "seeds": 1, "verdict": False, **SETTINGS}
    reproduce("fast-slow", tmp_path, stages=("short",), **settings)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("short/runs/*/result.json")}
    assert len(before) == 6
    report = reproduce(
        "fast-slow", tmp_path, on_stage_end=lambda stage, *_: stages.append(stage.name), **settings
    )
    assert (tmp_path / "long" / "report.html").is_file()
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert stages == ["short", "long"] == list(report["stages"])
    short, long = (report["stages"][name]["summary"]["config"] for name in stages)
    assert (short["tokens"], long["tokens"]) == (640, 6400)
    assert json.loads((tmp_path / "findings.json").read_text()) == json.loads(json.dumps(report))


def test_unknown_studies_and_stages_are_rejected(tmp_path: Path) -> None:
    with raises_code("unknown-study"):
        reproduce("fastslow", tmp_path)
    with raises_code("unknown-stage"):
        reproduce("fast-slow", tmp_path, stages=("shrot",))
    assert not list(tmp_path.iterdir())


def test_variants_of_the_studies_exist() -> None:
    for study in PAPER_STUDIES.values():
        for stage in study.stages:
            settings = {"tokens": study.tokens, "seeds": study.seeds, **study.settings}
            grid = build_grid(ComparisonConfig.parse(data="toy", variants=stage.variants, **settings))
            assert {"standard", *stage.variants} <= {arm.variant.name for arm in grid.arms}


def comparison(**variants: tuple[list[float], list[float]]) -> Comparison:
    """A finished comparison: by variant, the last |g| (and share) of every seed and the losses."""
    runs = []
    for name, (gates, losses) in variants.items():
        for seed, (gate, loss) in enumerate(zip(gates, losses, strict=True)):
            looks = [{"step": 1, "slow_gate": [0.0], "slow_share": [0.0]}]
            looks += [{"step": 2, "slow_gate": [gate], "slow_share": [gate / 2, gate / 2]}]
            metrics = {"probe": looks if name != "standard" else [{"step": 1}]}
            result = {"status": "finished", "loss": loss}
            runs.append(RunData(name, "compare", f"{name}@gpt2", seed, 1e-3, 10, result, metrics, ""))
    reference, *others = (ArmSummary(name, "variant", "gpt2", f"{name}@gpt2") for name in variants)
    counts = RunCounts(len(runs), len(runs))
    summary = StudySummary(ComparisonConfig(), "", reference, tuple(others), counts)
    return Comparison(Path(), summary, runs)


def test_gate_findings() -> None:
    parts = {
        "standard": ([0.0] * 3, [4.0, 4.1, 4.2]),
        "slow": ([0.001, 0.002, 0.0015], [4.0, 4.11, 4.19]),
        "slow:warm-gate": ([0.1, 0.12, 0.11], [3.9, 4.0, 4.1]),
    }
    found = gate_findings(comparison(**parts))
    gates = {row["variant"]: row for row in found["gates"]}
    assert set(gates) == {"slow", "slow:warm-gate"}
    assert (gates["slow"]["open"], gates["slow:warm-gate"]["open"]) == (False, True)
    assert gates["slow:warm-gate"]["slow_share_last"]["mean"] == pytest.approx(0.055)
    assert gates["slow:warm-gate"]["slow_gate_first"]["mean"] == 0
    (contrast,) = found["contrasts"]
    assert (contrast["variant"], contrast["against"]) == ("slow:warm-gate", "slow")
    assert contrast["difference"]["mean"] == pytest.approx(-0.1)
    assert found["sentences"][-1].endswith("helps")
