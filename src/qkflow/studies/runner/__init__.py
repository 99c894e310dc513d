"""Execution of the runs of a study.

engines       what an engine is, and local processes
ray_engine    the machines of a Ray cluster
ray_cluster   the connection to it
slurm_engine  a job array of SLURM
fork_server   local workers, forked from a process that has imported torch
launcher      one run in several processes
execution     a queue of runs with a few workers at a time
live          the table of a running study
study_dir     the files of a study
"""

from __future__ import annotations

from collections.abc import Sequence

from qkflow.studies.config import ExecutionConfig
from qkflow.studies.runner.engines import WORKER_MODULE, Engine, LocalEngine


def build_engine(
    execution: ExecutionConfig,
    device: str = "auto",
    *,
    command: Sequence[str] | None = None,
    module: str = WORKER_MODULE,
) -> Engine:
    """Build an engine. Workers execute `module`, or `command` with the run's folder as last argument."""
    if execution.engine == "ray":
        from qkflow.studies.runner.ray_engine import RayEngine

        return RayEngine(execution, device, command=command, module=module)
    if execution.engine == "slurm":
        from qkflow.studies.runner.slurm_engine import SlurmEngine

        return SlurmEngine(execution, command=command, module=module)
    processes = execution.processes_per_run
    return LocalEngine(command, execution.threads, device, module=module, processes=processes)
