"""Start jobs with the elastic agent of torchrun, by fork, so that all processes pay for one import.

    python launch_processes.py JOBS              a JSON list of jobs, which run one after the other
    torchrun … launch_processes.py RUNS          the runs of one job, in processes of torchrun itself

A job is {"processes": 2, "runs": [RUN, …]}; its runs share one process group. A run is {"folder": PATH}, in
which RANK stands for the number of the process, and

    parallel  mode of the run (default: that of its config)
    stop      step at which the last process sends itself SIGTERM: all processes must stop at the same step
    kill      step at which the last process kills itself, unless the job has been restarted

Printed: one JSON line per job, with the exit codes of every run by rank, or with the first failure.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported by DDP
import torch.distributed.checkpoint
import torch.distributed.fsdp
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from qkflow.training import Trainer, worker
from qkflow.training.callbacks import StderrCallback
from qkflow.training.distributed import process_group


class SignalAt(StderrCallback):
    def __init__(self, signals: dict[int, signal.Signals]) -> None:
        self.signals = signals

    def on_step(self, trainer: Trainer, loss: torch.Tensor) -> None:
        context = trainer.dist_context
        if trainer.step in self.signals and context.rank == context.world_size - 1:
            os.kill(os.getpid(), self.signals[trainer.step])


def execute(folder: str, parallel: Any = None, stop: int = 0, kill: int = 0) -> int:
    """Train in a process of a job. Return the exit code."""
    signals = {stop: signal.SIGTERM}
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        signals[kill] = signal.SIGKILL
    path = Path(folder.replace("RANK", os.environ["RANK"]))
    return worker.exit_code_of(path, lambda: worker.run_worker(path, SignalAt(signals), parallel))


def execute_all(runs: list[dict[str, Any]]) -> list[int]:
    torch.set_num_threads(1)
    with process_group(torch.device("cpu")):
        return [execute(**run) for run in runs]


def launch(processes: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id="tests",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(),
    )
    try:
        codes = elastic_launch(config, execute_all)(runs)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return {"failed_rank": rank, "signal": failure.signal_name()}
    return {"codes": [[codes[rank][run] for rank in range(processes)] for run in range(len(runs))]}


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    if "RANK" in os.environ:
        sys.exit(max(execute_all(arguments)))
    for job in arguments:
        print(json.dumps(launch(**job)), flush=True)
