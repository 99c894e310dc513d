"""One run in several processes."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from qkflow.studies.runner.engines import LocalEngine
from qkflow.studies.runner.launcher import launch

# Every rank writes its environment; then it behaves as its last argument says.
RANK = """
import json, os, signal, sys, time
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
folder, what = sys.argv[1:]
rank = os.environ["RANK"]
stopped = []
signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
with open(f"{folder}/{rank}.part", "w") as file:
    json.dump({**{name: os.environ[name] for name in names}, "pid": os.getpid()}, file)
os.replace(f"{folder}/{rank}.part", f"{folder}/{rank}")
if what == "killed" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
while what != "finish" and not stopped:
    time.sleep(0.02)
sys.exit(75 if stopped else 0)
"""


def command(folder: Path, what: str) -> list[str]:
    return [sys.executable, "-S", "-c", RANK, str(folder), what]


@pytest.fixture(autouse=True)
def _restore_signals() -> object:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_ranks_get_the_environment_of_a_process_group(tmp_path: Path) -> None:
    assert launch(3, command(tmp_path, "finish")) == 0
    ranks = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert [each["RANK"] for each in ranks] == [each["LOCAL_RANK"] for each in ranks] == ["0", "1", "2"]
    assert {each["WORLD_SIZE"] for each in ranks} == {"3"}
    assert len({each["MASTER_PORT"] for each in ranks}) == 1


def test_killed_rank_ends_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(2, command(tmp_path, "killed")) == 1
    assert "rank 1 was killed by signal 9" in capfd.readouterr().err
    survivor = json.loads((tmp_path / "0").read_text())["pid"]
    with pytest.raises(ProcessLookupError):
        os.kill(survivor, 0)


def test_run_with_two_processes_equals_one(run_folder: Callable[..., Path]) -> None:
    losses = {}
    for processes in (1, 2):
        folder = run_folder(f"run{processes}", device="cpu")
        engine = LocalEngine(processes=processes, device="cpu")
        try:
            worker = engine.start(folder, 0)
            while (code := worker.poll()) is None:
                time.sleep(0.05)
        finally:
            engine.close()
        assert code == 0, (folder / "log.txt").read_text()
        losses[processes] = json.loads((folder / "result.json").read_text())["loss"]
    assert losses[2] == pytest.approx(losses[1], rel=1e-5)
