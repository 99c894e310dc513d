"""Start runs as torchrun does, but by fork, so that all of them pay for one import.

    python launch_processes.py FOLDER:PROCESSES:MODE:STOP …   one run after the other; STOP: a step, or 0

The stop signal is sent to the last process only: all processes must stop at the same step.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp

from qkflow.training import Trainer, worker
from qkflow.training.callbacks import StderrCallback


class StopAt(StderrCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: Trainer, loss: torch.Tensor) -> None:
        context = trainer.dist_context
        if trainer.step == self.step and context.rank == context.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def launch(folder: Path, n_processes: int, mode: Any, stop: int) -> list[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(n_processes):
        pid = os.fork()
        if pid == 0:
            if n_processes > 1:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n_processes)}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            try:
                code = worker.run_worker(folder, StopAt(stop), None if mode == "none" else mode)
            except BaseException:
                traceback.print_exc()
                code = 99
            os._exit(code)
        children.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for one in sys.argv[1:]:
        folder, n_processes, mode, stop = one.rsplit(":", 3)
        print(one, launch(Path(folder), int(n_processes), mode, int(stop)), flush=True)
