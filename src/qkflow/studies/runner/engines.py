"""What an engine is, and the engine of this machine.

To add an engine (Kubernetes, ...):
1. write a class with the methods of `Engine`, and one with the three methods of `WorkerHandle`;
2. add it to `qkflow.studies.runner.build_engine`, and its name to `qkflow.studies.config.EngineName`.

An engine starts one worker per run: `python -m qkflow.training.worker FOLDER`, or the command of the study.
`LocalEngine` forks the former from a server (`fork_server`). The run's folder is the only interface between
worker and study, so all machines must share it. The exit code of a worker (`qkflow.training.run_dir`) tells
how the run ended:

| exit code | meaning |
|---|---|
| 0 (EXIT_FINISHED) | finished: result.json is written |
| 74 (EXIT_LOCKED) | not started: another process trains in the folder |
| 75 (EXIT_INTERRUPTED) | stopped by SIGTERM: the state is saved |
| 2 (EXIT_BAD_INPUT) | bad input: the last line of log.txt is `InputError.to_line()` |
| other | failed: result.json or the last line of log.txt has the reason |
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from qkflow.locks import find_remote_owner, owner_file, try_lock
from qkflow.studies.runner import fork_server
from qkflow.studies.runner.study_dir import LOG_FILE
from qkflow.system import process_cpu_count
from qkflow.training.run_dir import RUN_LOCK

WORKER_MODULE = "qkflow.training.worker"
LAUNCHER_MODULE = "qkflow.studies.runner.launcher"
# what `WorkerHandle.poll` returns besides exit codes
RUN_LOCKED = -1001  # not started: another process is using the run's folder
WORKER_LOST = -1002  # the machine of the worker is gone


class WorkerHandle(Protocol):
    """One worker that an engine has started.

    `sentinel` is a file descriptor that becomes readable when the worker exits; None if there is none.
    """

    @property
    def sentinel(self) -> int | None: ...

    def poll(self) -> int | None:
        """Return None while the worker runs, then its exit code, RUN_LOCKED or WORKER_LOST. Never blocks."""

    def stop(self) -> None:
        """Ask the worker to save its state and exit (SIGTERM). Does not wait."""

    def kill(self) -> None:
        """Kill the worker and wait until it is gone."""


@dataclass(frozen=True)
class Retries:
    """How often a run is started again: after its machine was lost, and after its program has failed."""

    lost: int = 0
    failed: int = 0


class Engine(Protocol):
    """Starts workers. `execution.execute_runs` decides which run is started when."""

    @property
    def retries(self) -> Retries: ...

    @property
    def has_queue(self) -> bool:
        """Whether all runs are started at once, since a scheduler decides how many execute at a time.

        Its jobs outlive the study, which finds them again.
        """

    def default_jobs(self) -> int:
        """Return how many workers to run at a time."""

    def check_folder(self, folder: Path) -> None:
        """Raise InputError if a machine of the engine cannot use the study's folder, which exists."""

    def start(self, folder: Path, slot: int) -> WorkerHandle:
        """Start the worker of the run in `folder`; `slot` < jobs is free, and may select a GPU.

        stdout and stderr of the worker go to `folder/log.txt`.
        """

    def close(self) -> None:
        """Release what the engine holds, after its last worker."""


def worker_command(command: Sequence[str] | None, module: str, processes: int) -> tuple[str, ...]:
    """Return the command of a worker without its last argument, the folder of the run."""
    if command:
        return tuple(command)
    if processes > 1:
        return (sys.executable, "-m", LAUNCHER_MODULE, str(processes), module)
    return (sys.executable, "-m", module)


def thread_variables(threads: int) -> dict[str, str]:
    """Return the environment variables that limit the CPU threads of a process."""
    return {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}


def cuda_device_count(device: str) -> int:
    """Return the number of CUDA devices to distribute workers over, 0 if `device` excludes CUDA."""
    if device not in ("auto", "cuda"):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


class LockedRun:
    """The handle of a run that another process is using: no worker was started."""

    sentinel = None

    def poll(self) -> int:
        return RUN_LOCKED

    def stop(self) -> None:
        pass

    def kill(self) -> None:
        pass


class SubprocessWorker:
    """One worker as a process that the study has started by a command."""

    sentinel = None

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def poll(self) -> int | None:
        is_new = self._process.returncode is None
        code = self._process.poll()
        if is_new and code is not None and hasattr(os, "killpg"):
            fork_server.kill_group(self._process.pid)
        return code

    def stop(self) -> None:
        if self.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        if self.poll() is None:
            self._process.kill()
            while self.poll() is None:
                time.sleep(0.01)


@contextmanager
def _run_lock(folder: Path) -> Iterator[tuple[bool, tuple[int, ...]]]:
    """Try to lock a run; yield whether it was free, and the file descriptors for the worker to inherit.

    The worker holds the lock through its descriptor until it exits, even if the study that started it is
    killed. A resumed study then waits for this worker instead of training the same run beside it; also for
    one on another machine, until its heartbeat is old.
    """
    is_free = find_remote_owner(owner_file(folder, RUN_LOCK)) is None
    if sys.platform == "win32":  # no inheritable locks
        yield is_free, ()
        return
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield try_lock(descriptor) and is_free, (descriptor,)
    finally:
        os.close(descriptor)


class LocalEngine:
    """Processes of this machine, one per CPU core or GPU: small models train faster side by side.

    Workers execute `module`, forked from a server that has imported it. With `command`, with several
    `processes` per run, or where fork is not available, each worker is a new interpreter. With `owns_workers`
    they do not outlive this process.
    """

    retries = Retries()  # a failure on one's own machine is shown at once
    has_queue = False

    def __init__(
        self,
        command: Sequence[str] | None = None,
        threads: int = 1,
        device: str = "auto",
        *,
        module: str = WORKER_MODULE,
        processes: int = 1,
        owns_workers: bool = False,
    ) -> None:
        self.threads, self.processes = threads, processes
        self.n_gpus = cuda_device_count(device)
        self.command = worker_command(command, module, processes)
        self._env = thread_variables(threads)
        self._server = None
        is_module = command is None and processes == 1
        if fork_server.is_supported() and (is_module or owns_workers):
            self._server = fork_server.ForkServer(
                module,
                self._env,
                command=None if is_module else self.command,
                owns_workers=owns_workers,
            )

    def default_jobs(self) -> int:
        if self.n_gpus:
            return max(1, self.n_gpus // self.processes)
        return max(1, process_cpu_count() // (self.threads * self.processes))

    def check_folder(self, folder: Path) -> None:
        pass

    def _gpu_variables(self, slot: int) -> dict[str, str]:
        if not self.n_gpus:
            return {}
        gpus = ((slot * self.processes + rank) % self.n_gpus for rank in range(self.processes))
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}

    def start(self, folder: Path, slot: int) -> WorkerHandle:
        env = self._gpu_variables(slot)
        with _run_lock(folder) as (is_free, inherited), open(folder / LOG_FILE, "ab") as log:
            if not is_free:
                return LockedRun()
            if self._server is not None:
                return self._server.start_worker(folder, env, log, *inherited)
            process = subprocess.Popen(
                [*self.command, str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._env, **env},
                # Ctrl-C reaches the whole process group of a terminal; workers get one SIGTERM instead.
                start_new_session=True,
                pass_fds=inherited,
            )
            return SubprocessWorker(process)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
