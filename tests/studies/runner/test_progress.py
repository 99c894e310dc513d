"""The progress of a study, read from its folder."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from input_errors import raises_code
from qkflow.studies.runner.progress import SILENT_AFTER, StudyProgress
from qkflow.training.metrics_log import MetricsTail


def write_plan(folder: Path, *ids: str) -> None:
    runs = [
        {"id": name, "phase": "compare", "cell": f"{name}@gpt2", "seed": 0, "lr": 1e-3, "tokens": 1000}
        for name in ids
    ]
    folder.mkdir(exist_ok=True)
    (folder / "study.yaml").write_text(yaml.safe_dump({"config": {}, "arms": [], "runs": runs}))


def append(folder: Path, run: str, **row: Any) -> None:
    path = folder / "runs" / run
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.yaml").touch()
    with open(path / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"kind": "train", **row}) + "\n")


def test_status_share_and_time_left(tmp_path: Path) -> None:
    write_plan(tmp_path, "a", "b", "c", "d")
    append(tmp_path, "a", step=1, tokens=250, loss=3.0, tokens_per_second=50.0)
    append(tmp_path, "b", step=4, tokens=1000, loss=2.0)
    (tmp_path / "runs" / "b" / "result.json").write_text('{"status": "finished", "loss": 1.5}')
    append(tmp_path, "c", step=1, tokens=100, loss=3.0)
    (tmp_path / "runs" / "c" / "result.json").write_text('{"status": "failed", "error": "diverged"}')
    progress = StudyProgress(tmp_path)
    progress.update()
    assert [run.status for run in progress.runs.values()] == ["running", "finished", "failed", "waiting"]
    assert progress.runs["b"].loss == 1.5
    state = progress.to_dict()
    assert state["share"] == pytest.approx((250 + 1000 + 1000) / 4000)
    assert state["seconds_left"] == pytest.approx((750 + 1000) / 50)
    assert [run["error"] for run in state["failed"]] == ["diverged"]
    assert state["curves"] == [{"name": "a@gpt2, seed 0", "x": [250], "y": [3.0]}]


def test_plan_grows_and_silent_runs_are_told_apart(tmp_path: Path) -> None:
    write_plan(tmp_path, "a")
    append(tmp_path, "a", step=1, tokens=250, loss=3.0)
    progress = StudyProgress(tmp_path)
    progress.update()
    key = progress.results_key
    progress.update(time.monotonic() + SILENT_AFTER + 1)
    assert progress.runs["a"].status == "silent"
    assert progress.seconds_left() is None
    assert progress.results_key == key
    write_plan(tmp_path, "a", "b")
    progress.update()
    assert list(progress.runs) == ["a", "b"]
    assert progress.results_key != key


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_clock_that_jumps_does_not_make_a_run_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    write_plan(tmp_path, "a")
    append(tmp_path, "a", step=1, tokens=250, loss=3.0)
    progress, start = StudyProgress(tmp_path), time.time()
    progress.update()
    monkeypatch.setattr(time, "time", lambda: start + jump)
    progress.update()
    assert progress.runs["a"].status == "running"
    now = time.monotonic()
    for name in ("config.yaml", "metrics.jsonl"):  # written after the jump
        os.utime(tmp_path / "runs" / "a" / name, (start + jump, start + jump))
    progress.update(now)
    assert progress.runs["a"].status == "running"
    progress.update(now + SILENT_AFTER + 1)
    assert progress.runs["a"].status == "silent"


def test_resumed_run_drops_the_repeated_part_of_its_curve(tmp_path: Path) -> None:
    write_plan(tmp_path, "a")
    for step in (1, 2, 3):
        append(tmp_path, "a", step=step, tokens=100 * step, loss=4.0 - step)
    progress = StudyProgress(tmp_path)
    progress.update()
    path = tmp_path / "runs" / "a" / "metrics.jsonl"
    kept = path.read_text().splitlines(keepends=True)[:1]
    path.unlink()
    path.write_text("".join(kept))  # a worker that resumes after step 1
    append(tmp_path, "a", step=2, tokens=200, loss=9.0)
    progress.update()
    assert progress.runs["a"].curve == [(100, 3.0), (200, 9.0)]


def test_tail_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read_new() == []
    path.write_text('{"kind": "train", "step": 1}\n{"kind": "tra')
    assert [row["step"] for row in tail.read_new()] == [1]
    with open(path, "a") as file:
        file.write('in", "step": 2}\n')
    assert [row["step"] for row in tail.read_new()] == [2]


def test_folder_without_a_plan(tmp_path: Path) -> None:
    with raises_code("not-a-study"):
        StudyProgress(tmp_path).update()
    (tmp_path / "study.yaml").write_text("{config: {}, arms: [], runs: [{id: a}]}")
    with raises_code("corrupt-study"):
        StudyProgress(tmp_path).update()
