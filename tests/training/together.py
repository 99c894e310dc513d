"""Starts runs as torchrun would, but forked, so that all of them cost one import.

    python together.py FOLDER:PROCESSES:KIND:STOP …   one run after the other; STOP = a step to stop at, or 0

Stopping is asked of the last process alone: all of them must stop at the same step.
"""

import os
import signal
import socket
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp

from qkflow.training import worker


class StopAt(worker.StderrCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, run, loss) -> None:
        if run.step == self.step and run.team.rank == run.team.world - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def launch(folder: Path, processes: int, kind: str, stop: int) -> list[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(processes):
        pid = os.fork()
        if pid == 0:
            if processes > 1:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            try:
                code = worker.run_worker(folder, StopAt(stop), None if kind == "none" else kind)
            except BaseException:
                import traceback

                traceback.print_exc()
                code = 99
            os._exit(code)
        children.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for one in sys.argv[1:]:
        folder, processes, kind, stop = one.rsplit(":", 3)
        print(one, launch(Path(folder), int(processes), kind, int(stop)), flush=True)
