"""Stopping, killing and going on, with real processes and real signals."""

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
from qkflow.studies import compare
from qkflow.studies.grid import RunSpec
from qkflow.studies.runner.engines import RUN_LOCKED, LocalEngine
from qkflow.studies.runner.execution import RunTracker
from qkflow.studies.runner.study_dir import RunDir
from toy_study import TOY

# Twenty steps of a tenth of a second each: long enough to be interrupted, for sure.
ASK = {"variants": "sleepy", "inits": "gpt2", "seeds": 1, "verdict": False, "jobs": 2}
SCRIPT = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background is deaf to it
sys.path.insert(0, sys.argv[3])
from toy_study import TOY
from qkflow.studies import compare
from qkflow.studies.runner.execution import Stopped
try:
    compare("toy", out=sys.argv[1], **{**TOY, **json.loads(sys.argv[2])})
except Stopped:
    sys.exit(130)
"""


@contextmanager
def started(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A comparison in a process of its own, once its slow run is under way."""
    arguments = [
        sys.executable,
        "-c",
        SCRIPT,
        str(folder),
        json.dumps(ASK),
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


def came_from(run: Path) -> list[int]:
    """The step every worker of a run began at."""
    return [int(line.split()[-1]) for line in (run / "starts.txt").read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    answer = compare("toy", out=tmp_path_factory.mktemp("calm") / "s", **{**TOY, **ASK})
    return [row["loss"] for row in answer.rows]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_it_saves_and_the_same_call_goes_on(
    number: signal.Signals, tmp_path: Path, undisturbed: list[Any]
) -> None:
    folder = tmp_path / "s"
    with started(folder) as process:
        process.send_signal(number)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "save their state" in said
    (run,) = slow_runs(folder)
    assert (run / "checkpoints").exists()
    assert not (run / "result.json").exists()
    answer = compare("toy", out=folder, **{**TOY, **ASK})
    first, second = came_from(run)
    assert first == 0
    assert second >= 3
    assert [row["loss"] for row in answer.rows] == undisturbed


def test_killed_it_leaves_a_worker_that_is_waited_for(tmp_path: Path, undisturbed: list[Any]) -> None:
    folder = tmp_path / "s"
    with started(folder) as process:
        process.kill()
    (run,) = slow_runs(folder)
    assert not (run / "result.json").exists()  # the orphan is at work
    answer = compare("toy", out=folder, **{**TOY, **ASK})
    assert came_from(run) == [0]  # nobody trained beside it
    assert [row["loss"] for row in answer.rows] == undisturbed


def test_killed_with_its_workers_it_goes_on_from_their_last_checkpoints(
    tmp_path: Path, undisturbed: list[Any]
) -> None:
    folder = tmp_path / "s"
    with started(folder) as process:
        (run,) = slow_runs(folder)
        process.kill()
        os.kill(int((run / "starts.txt").read_text().split()[0]), signal.SIGKILL)
    assert not (run / "result.json").exists()
    answer = compare("toy", out=folder, **{**TOY, **ASK})
    first, second = came_from(run)
    assert first == 0 < second
    assert [row["loss"] for row in answer.rows] == undisturbed


def test_a_busy_run_is_not_started_twice(tmp_path: Path) -> None:
    engine = LocalEngine((sys.executable, "-c", "import time; time.sleep(30)"))
    first = engine.start(tmp_path, 0)
    assert engine.start(tmp_path, 1).poll() == RUN_LOCKED
    first.kill()
    third = engine.start(tmp_path, 0)
    assert third.poll() is None
    third.kill()


def test_workers_get_their_threads(tmp_path: Path) -> None:
    code = "import os; print(os.environ['OMP_NUM_THREADS'], os.environ['MKL_NUM_THREADS'])"
    handle = LocalEngine((sys.executable, "-c", code), threads=3).start(tmp_path, 0)
    while handle.poll() is None:
        time.sleep(0.02)
    assert RunDir(tmp_path).last_log_line() == "3 3"


def watched(folder: Path) -> RunTracker:
    config = {"train": {"batch_size": 1}, "data": {"seq_len": 10}}
    return RunTracker(RunSpec("compare", "euler@gpt2", 0, 1e-3, 100, config), RunDir(folder))


def test_reads_what_is_appended_even_in_pieces(tmp_path: Path) -> None:
    one = watched(tmp_path)
    one.read_new_metrics()
    row = json.dumps({"kind": "train", "step": 3, "tokens": 30, "loss": 2.5, "tokens_per_second": 7.0})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        for piece in (row[:20], row[20:] + "\n", '{"kind": "eval", "step": 4, "tokens": 40, "loss": NaN}\n'):
            file.write(piece)
            file.flush()
            one.read_new_metrics()
    assert (one.step, one.tokens, one.loss, one.tokens_per_second) == (4, 40, 2.5, 7.0)
    assert one.time_left() == pytest.approx(60 / 7)


def test_the_later_row_of_a_step_counts_and_a_cut_line_does_not(tmp_path: Path) -> None:
    rows = [{"kind": "eval", "step": s, "loss": loss} for s, loss in ((0, 9.0), (5, 5.0), (5, 4.0))]
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "eval", "st'
    (tmp_path / "metrics.jsonl").write_text(text)
    assert [row["loss"] for row in RunDir(tmp_path).metrics()["eval"]] == [9.0, 4.0]


def test_a_killed_worker_is_a_failure_that_says_so(tmp_path: Path) -> None:
    one = watched(tmp_path)
    handle = LocalEngine((sys.executable, "-c", f"import os; os.kill(os.getpid(), {signal.SIGKILL})")).start(
        tmp_path, 0
    )
    one.mark_running()
    while (code := handle.poll()) is None:
        time.sleep(0.02)
    one.mark_exited(code)
    assert (one.status, one.message) == ("failed", "killed by signal 9")
    assert one.run_dir.result() == {"status": "failed", "error": "killed by signal 9"}
    assert os.path.exists(tmp_path / "log.txt")


def test_ray_keeps_the_same_contract(tmp_path: Path, undisturbed: list[Any]) -> None:
    pytest.importorskip("ray")
    answer = compare("toy", out=tmp_path / "s", engine="ray", **{**TOY, **ASK})
    assert [row["loss"] for row in answer.rows] == undisturbed
