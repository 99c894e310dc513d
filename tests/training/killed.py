"""Runs a worker again and again, and kills it: `python killed.py FOLDER random|exact SEED`.

The child is forked, so that twenty lives cost one import. `random` kills twenty times after a random while;
`exact` kills at every single operation that a checkpoint consists of, one life each.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from qkflow.training import RunConfig, checkpoint, worker

KILLS = 20


def child(folder: Path, die_at: int | None = None) -> int:
    pid = os.fork()
    if pid == 0:
        if die_at is not None:
            die_in_operation(die_at)
        os._exit(worker.main([str(folder)]))
    return pid


def die_in_operation(number: int) -> None:
    """Kill this process just before the `number`-th operation on files that checkpoints are made of."""
    count = 0

    def deadly(operation):
        def act(*args, **kwargs):
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args, **kwargs)

        return act

    os.fsync, os.replace, os.rmdir, os.unlink = map(deadly, (os.fsync, os.replace, os.rmdir, os.unlink))
    checkpoint.write_tensors = deadly(checkpoint.write_tensors)


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_at_random(folder: Path, seed: int) -> tuple[int, int]:
    chance = random.Random(seed)
    kills = writing = 0
    longest = 0.35
    while kills < KILLS:
        pid = child(folder)
        time.sleep(chance.uniform(0.02, longest))
        os.kill(pid, signal.SIGKILL)
        if wait(pid) != -signal.SIGKILL:
            raise SystemExit(f"finished after {kills} kills: make the run longer")
        kills += 1
        writing += any(folder.glob("checkpoints/.*.part"))
        if (
            reached(folder) > kills / KILLS
        ):  # a quick machine: shorter lives, or it will finish before the last
            longest *= 0.7
    return kills, writing


def reached(folder: Path) -> float:
    """The share of the run that the newest checkpoint stands for."""
    steps = [int(path.name.removeprefix("step-")) for path in folder.glob("checkpoints/step-*")]
    return max(steps, default=0) / RunConfig.load(folder / "config.yaml").train.steps


def kill_exactly(folder: Path) -> tuple[int, int]:
    kills = writing = 0
    while wait(child(folder, die_at=kills + 1)) == -signal.SIGKILL:
        kills += 1
        writing += any(folder.glob("checkpoints/.*.part"))
        if kills >= 40:
            break
    return kills, writing


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    kills, writing = (
        kill_at_random(where, int(sys.argv[3])) if sys.argv[2] == "random" else kill_exactly(where)
    )
    code = wait(child(where))
    print(f"{kills} kills, {writing} while a checkpoint was being written, exit code {code}")
    sys.exit(code)
