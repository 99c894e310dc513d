"""Run a worker repeatedly and kill it: `python kill_worker.py FOLDER random SEED|exact STRIDE`.

Workers are forked, so that all of them pay for one import. `random` kills 20 times after a random time;
`exact` kills before every STRIDE-th file operation of saving a checkpoint, one worker each.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from qkflow.training import RunConfig, checkpoint, worker

KILLS = 20


def start_worker(folder: Path, die_at: int | None = None) -> int:
    pid = os.fork()
    if pid == 0:
        if die_at is not None:
            die_at_operation(die_at)
        os._exit(worker.main([str(folder)]))
    return pid


def die_at_operation(number: int) -> None:
    """Kill this process just before its `number`-th file operation."""
    count = 0

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args, **kwargs)

        return call

    os.fsync, os.replace, os.rmdir, os.unlink = map(counted, (os.fsync, os.replace, os.rmdir, os.unlink))
    checkpoint.write_tensors = counted(checkpoint.write_tensors)


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_at_random(folder: Path, seed: int) -> tuple[int, int]:
    generator = random.Random(seed)
    kills = while_writing = 0
    longest = 0.35
    while kills < KILLS:
        pid = start_worker(folder)
        time.sleep(generator.uniform(0.02, longest))
        os.kill(pid, signal.SIGKILL)
        if wait(pid) != -signal.SIGKILL:
            raise SystemExit(f"finished after {kills} kills: make the run longer")
        kills += 1
        while_writing += any(folder.glob("checkpoints/.*.part"))
        if progress(folder) > kills / KILLS:  # on a fast machine, kill earlier
            longest *= 0.7
    return kills, while_writing


def progress(folder: Path) -> float:
    steps = [int(path.name.removeprefix("step-")) for path in folder.glob("checkpoints/step-*")]
    return max(steps, default=0) / (RunConfig.load(folder / "config.yaml").train.steps or 1)


def kill_exactly(folder: Path, stride: int) -> tuple[int, int]:
    kills = while_writing = 0
    while wait(start_worker(folder, die_at=kills * stride + 1)) == -signal.SIGKILL:
        kills += 1
        while_writing += any(folder.glob("checkpoints/.*.part"))
        if kills >= 40:
            break
    return kills, while_writing


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    kill = kill_at_random if sys.argv[2] == "random" else kill_exactly
    kills, while_writing = kill(folder, int(sys.argv[3]))
    code = wait(start_worker(folder))
    print(f"{kills} kills, {while_writing} while a checkpoint was being written, exit code {code}")
    sys.exit(code)
