"""Start jobs with the elastic agent of torchrun, but by fork, so that all processes pay for one import.

    python launch_processes.py JOBS     a JSON list of jobs, which run one after the other

A job is {"processes": 2, "runs": [RUN, …]}; its runs share one process group. A run is {"folder": PATH} and

    parallel  mode of the run (default: that of its config)
    stop      step at which the last process sends itself SIGTERM: all processes must stop at the same step
    kill      step at which the last process kills itself, if the job has not been restarted

Printed: one JSON line per job, the exit codes of every run by rank, or the failure of the job.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from qkflow.training import Trainer, worker
from qkflow.training.callbacks import StderrCallback


class SignalAt(StderrCallback):
    def __init__(self, stop: int = 0, kill: int = 0) -> None:
        self.signals = {stop: signal.SIGTERM, kill: signal.SIGKILL}

    def on_step(self, trainer: Trainer, loss: torch.Tensor) -> None:
        context = trainer.dist_context
        if trainer.step in self.signals and context.rank == context.world_size - 1:
            os.kill(os.getpid(), self.signals[trainer.step])


def execute(
    folder: str, parallel: Any = None, stop: int = 0, kill: int = 0
) -> int:
    """Train in a process of a job. Return the exit code."""
    is_restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    callback = SignalAt(stop, 0 if is_restarted else kill)
    return worker.exit_code_of(Path(folder), lambda: worker.run_worker(Path(folder), callback, parallel))


def execute_all(runs: list[dict[str, Any]]) -> list[int]:
    torch.distributed.init_process_group("gloo")
    codes = [execute(**run) for run in runs]
    torch.distributed.destroy_process_group()
    return codes


def launch(processes: int, runs: list[dict[str, Any]], max_restarts: int = 0) -> dict[str, Any]:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
        max_restarts=max_restarts,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(),
    )
    begin = time.monotonic()
    try:
        codes = elastic_launch(config, execute_all)(runs)
    except ChildFailedError as error:
        failures = {rank: failure.message for rank, failure in error.failures.items()}
        rank, first = error.get_first_failure()
        return {"first": [rank, first.signal_name()], "failures": failures, "text": str(error), "t": time.monotonic()-begin}
    return {"codes": [[codes[rank][i] for rank in range(processes)] for i in range(len(runs))], "t": time.monotonic()-begin}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for job in json.loads(sys.argv[1]):
        print(json.dumps(launch(**job)), flush=True)
