"""Interrupting, killing and resuming studies, with real processes and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import toy_study
from qkflow.errors import InputError
from qkflow.studies import compare
from qkflow.studies.grid import RunSpec
from qkflow.studies.runner.engines import LocalEngine
from qkflow.studies.runner.execution import RunTracker
from qkflow.studies.runner.study_dir import RunDir
from qkflow.training.run_dir import EXIT_BAD_INPUT
from toy_study import TOY

# Twenty steps of 0.1 s: long enough to be interrupted.
SETTINGS = {"variants": "sleepy", "inits": "gpt2", "seeds": 1, "verdict": False, "jobs": 2}
SCRIPT = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes ignore SIGINT
sys.path.insert(0, sys.argv[3])
from toy_study import TOY
from qkflow.errors import InputError
from qkflow.studies import compare
from qkflow.studies.runner.execution import StudyInterrupted
try:
    compare("toy", out=sys.argv[1], **{**TOY, **json.loads(sys.argv[2])})
except StudyInterrupted:
    sys.exit(130)
"""


@contextmanager
def running_study(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a comparison in its own process; yield when its slow run has trained a few steps."""
    arguments = [
        sys.executable,
        "-c",
        SCRIPT,
        str(folder),
        json.dumps(SETTINGS),
        str(Path(toy_study.__file__).parent),
    ]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not slow_runs(folder) or steps(slow_runs(folder)[0]) < 3:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.communicate()


def slow_runs(folder: Path) -> list[Path]:
    return list(folder.glob("runs/sleepy*"))


def steps(run: Path) -> int:
    rows = RunDir(run).metrics().get("train", [])
    return rows[-1]["step"] if rows else 0


def start_steps(run: Path) -> list[int]:
    """Return the step at which each worker of a run started."""
    return [int(line.split()[-1]) for line in (run / "starts.txt").read_text().splitlines()]


@pytest.fixture(scope="module")
def expected_losses(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Losses of a study that is not interrupted."""
    comparison = compare("toy", out=tmp_path_factory.mktemp("whole") / "s", **{**TOY, **SETTINGS})
    return [row["loss"] for row in comparison.rows]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_study_resumes(
    number: signal.Signals, tmp_path: Path, expected_losses: list[Any]
) -> None:
    folder = tmp_path / "s"
    with running_study(folder) as process:
        process.send_signal(number)
        stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "saving their state" in stderr
    (run,) = slow_runs(folder)
    assert (run / "checkpoints").exists()
    assert not (run / "result.json").exists()
    comparison = compare("toy", out=folder, **{**TOY, **SETTINGS})
    first, second = start_steps(run)
    assert first == 0
    assert second >= 3
    assert [row["loss"] for row in comparison.rows] == expected_losses


def test_killed_study_waits_for_its_orphaned_worker(tmp_path: Path, expected_losses: list[Any]) -> None:
    folder = tmp_path / "s"
    with running_study(folder) as process:
        process.kill()
    (run,) = slow_runs(folder)
    assert not (run / "result.json").exists()  # the orphaned worker still trains
    comparison = compare("toy", out=folder, **{**TOY, **SETTINGS})
    assert start_steps(run) == [0]  # no second worker was started
    assert [row["loss"] for row in comparison.rows] == expected_losses


def test_killed_workers_resume_from_their_checkpoints(tmp_path: Path, expected_losses: list[Any]) -> None:
    folder = tmp_path / "s"
    with running_study(folder) as process:
        (run,) = slow_runs(folder)
        process.kill()
        os.kill(int((run / "starts.txt").read_text().split()[0]), signal.SIGKILL)
    assert not (run / "result.json").exists()
    comparison = compare("toy", out=folder, **{**TOY, **SETTINGS})
    first, second = start_steps(run)
    assert first == 0 < second
    assert [row["loss"] for row in comparison.rows] == expected_losses


def make_tracker(folder: Path) -> RunTracker:
    config = {"train": {"batch_size": 1}, "data": {"seq_len": 10}}
    return RunTracker(RunSpec("compare", "euler@gpt2", 0, 1e-3, 100, config), RunDir(folder))


def test_read_new_metrics_of_partial_lines(tmp_path: Path) -> None:
    tracker = make_tracker(tmp_path)
    tracker.read_new_metrics()
    row = json.dumps({"kind": "train", "step": 3, "tokens": 30, "loss": 2.5, "tokens_per_second": 7.0})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        for piece in (row[:20], row[20:] + "\n", '{"kind": "eval", "step": 4, "tokens": 40, "loss": NaN}\n'):
            file.write(piece)
            file.flush()
            tracker.read_new_metrics()
    assert (tracker.step, tracker.tokens, tracker.loss, tracker.tokens_per_second) == (4, 40, 2.5, 7.0)
    assert tracker.time_left() == pytest.approx(60 / 7)


def test_killed_worker_is_recorded_as_failed(tmp_path: Path) -> None:
    tracker = make_tracker(tmp_path)
    handle = LocalEngine((sys.executable, "-c", f"import os; os.kill(os.getpid(), {signal.SIGKILL})")).start(
        tmp_path, 0
    )
    tracker.mark_running()
    while (code := handle.poll()) is None:
        time.sleep(0.02)
    tracker.mark_exited(code)
    assert (tracker.status, tracker.message) == ("failed", "killed by signal 9")
    assert tracker.run_dir.result() == {"status": "failed", "error": "killed by signal 9"}
    assert os.path.exists(tmp_path / "log.txt")


def test_bad_input_keeps_message_and_code(tmp_path: Path) -> None:
    tracker = make_tracker(tmp_path)
    error = InputError("seq_len 1 is too short [see docs]", code="invalid-seq-len")
    code = f"import sys; print({error.to_line()!r}); sys.exit({EXIT_BAD_INPUT})"
    handle = LocalEngine((sys.executable, "-c", code)).start(tmp_path, 0)
    tracker.mark_running()
    while (exit_code := handle.poll()) is None:
        time.sleep(0.02)
    tracker.mark_exited(exit_code)
    assert tracker.status == "failed"
    assert str(tracker.input_error()) == str(error)
    assert tracker.input_error().code == "invalid-seq-len"
