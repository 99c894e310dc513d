"""The studies of the papers, with real worker processes (of a toy problem)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from input_errors import raises_code
from qkflow.papers.reproduce import reproduce
from toy_study import TOY

SETTINGS = {name: value for name, value in TOY.items() if name != "controls"}


def test_stages_run_and_resume(tmp_path: Path) -> None:
    stages: list[str] = []
    settings: dict[str, Any] = {"data": "toy", "seeds": 1, "verdict": False, **SETTINGS}
    reproduce("fast-slow", tmp_path, stages=("short",), **settings)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("short/runs/*/result.json")}
    assert len(before) == 6
    report = reproduce("fast-slow", tmp_path, on_stage_end=lambda stage, *_: stages.append(stage), **settings)
    assert (tmp_path / "long" / "report.html").is_file()
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert stages == ["short", "long"] == list(report["stages"])
    short, long = (report["stages"][name]["summary"]["config"] for name in stages)
    assert (short["tokens"], long["tokens"]) == (640, 6400)
    assert json.loads((tmp_path / "findings.json").read_text()) == json.loads(json.dumps(report))


def test_unknown_studies_and_stages_are_rejected(tmp_path: Path) -> None:
    with raises_code("unknown-recipe"):
        reproduce("fastslow", tmp_path)
    with raises_code("unknown-stage"):
        reproduce("fast-slow", tmp_path, stages=("shrot",))
    assert not list(tmp_path.iterdir())


def test_longer_training_is_compared_across_stages(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"data": "toy", **SETTINGS}
    report = reproduce("compute-matched", tmp_path, **settings)
    equal, longer = (report["stages"][name]["summary"]["config"]["tokens"] for name in ("equal", "longer"))
    assert longer == pytest.approx(2.4 * equal, rel=0.01)
    assert "longer_training" not in report["stages"]["equal"]
    row = report["stages"]["longer"]["longer_training"]
    assert row["seeds"] == [0, 1, 2]
    assert row["ratio"] == pytest.approx(2.4, rel=0.01)
