"""Engines: where the runs of a study are executed.

To add an engine (SLURM, Kubernetes, ...):
1. write a class with the three methods of `Engine`, and one with the three methods of `WorkerHandle`;
2. add it to `ENGINES`, and its name to `EngineName` in `qkflow.studies.config`.

An engine starts one worker process per run: `python -m qkflow.training.worker FOLDER`, or the command of the
study. `LocalEngine` forks the former from a server (`fork_server`). The run's folder is the only interface
between worker and study, so all machines must share it. The exit code of a worker (`qkflow.training.run_dir`)
tells how the run ended:

| exit code | meaning |
|---|---|
| 0 (EXIT_FINISHED) | finished: result.json is written |
| 75 (EXIT_INTERRUPTED) | stopped by SIGTERM: the state is saved |
| 2 (EXIT_BAD_INPUT) | bad input: the last line of log.txt is `InputError.to_line()` |
| other | failed: result.json or the last line of log.txt has the reason |
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from qkflow import files
from qkflow.errors import InputError
from qkflow.studies.config import EngineName
from qkflow.studies.runner import fork_server
from qkflow.studies.runner.study_dir import LOG_FILE
from qkflow.system import process_cpu_count

WORKER_MODULE = "qkflow.training.worker"
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


class Engine(Protocol):
    """Starts workers. `execution.execute_runs` decides which run is started when."""

    def default_jobs(self) -> int:
        """Return how many workers to run at a time."""

    def start(self, folder: Path, slot: int) -> WorkerHandle:
        """Start the worker of the run in `folder`; `slot` < jobs is free, and may select a GPU.

        stdout and stderr of the worker go to `folder/log.txt`.
        """

    def close(self) -> None:
        """Release what the engine holds, after its last worker."""


class EngineFactory(Protocol):
    def __call__(
        self, command: Sequence[str] | None, threads: int, device: str, *, module: str = WORKER_MODULE
    ) -> Engine:
        """Build an engine. Workers execute `module`, or `command` with the run's folder as last argument."""


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
        return self._process.poll()

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@contextmanager
def _run_lock(path: Path) -> Iterator[tuple[bool, tuple[int, ...]]]:
    """Try to lock a run; yield whether it was free, and the file descriptors for the worker to inherit.

    The worker holds the lock through its descriptor until it exits, even if the study that started it is
    killed. A resumed study then waits for this worker instead of training the same run beside it.
    """
    if sys.platform == "win32":  # no inheritable locks
        yield True, ()
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield files.try_lock(descriptor), (descriptor,)
    finally:
        os.close(descriptor)


class LocalEngine:
    """Processes of this machine, one per CPU core or GPU: small models train faster side by side.

    Workers execute `module`, forked from a server that has imported it. With `command`, or where fork is not
    available, each worker is a new interpreter.
    """

    def __init__(
        self,
        command: Sequence[str] | None = None,
        threads: int = 1,
        device: str = "auto",
        *,
        module: str = WORKER_MODULE,
    ) -> None:
        self.threads = threads
        self.n_gpus = cuda_device_count(device)
        self.command = tuple(command or (sys.executable, "-m", module))
        self._env = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        use_server = command is None and fork_server.is_supported()
        self._server = fork_server.ForkServer(module, self._env) if use_server else None

    def default_jobs(self) -> int:
        return self.n_gpus or max(1, process_cpu_count() // self.threads)

    def start(self, folder: Path, slot: int) -> WorkerHandle:
        env = {"CUDA_VISIBLE_DEVICES": str(slot % self.n_gpus)} if self.n_gpus else {}
        with _run_lock(folder / ".lock") as (is_free, inherited), open(folder / LOG_FILE, "ab") as log:
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


class RayEngine:
    """Workers on the machines of a Ray cluster, which must share the study's folder."""

    def __init__(
        self,
        command: Sequence[str] | None = None,
        threads: int = 1,
        device: str = "auto",
        *,
        module: str = WORKER_MODULE,
    ) -> None:
        try:
            import ray
        except ImportError:
            raise InputError(
                '--engine ray needs Ray: pip install "qkflow[ray]"', code="missing-dependency"
            ) from None
        self.ray: Any = ray
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            ray.init(log_to_driver=False, configure_logging=False)
        resources = ray.cluster_resources()
        self.threads = threads
        self._n_gpus = int(resources.get("GPU", 0)) if device in ("auto", "cuda") else 0
        self._n_cpus = int(resources.get("CPU", 1))
        self._actor = ray.remote(num_cpus=threads, num_gpus=1 if self._n_gpus else 0)(_RayWorker)
        # None: each node executes the module with its own Python interpreter
        self.command, self.module = tuple(command) if command else None, module

    def default_jobs(self) -> int:
        return self._n_gpus or max(1, self._n_cpus // self.threads)

    def start(self, folder: Path, slot: int) -> WorkerHandle:
        actor = self._actor.remote(self.command, self.module, self.threads, str(folder.resolve()))
        return _RayWorkerHandle(self.ray, actor)

    def close(self) -> None:
        if self._owns_ray:
            self.ray.shutdown()


class _RayWorker:
    """Ray actor that starts a local worker on its node."""

    def __init__(self, command: Sequence[str] | None, module: str, threads: int, folder: str) -> None:
        # by a command: the actor executes one run, for which a server would not pay off
        engine = LocalEngine(command or (sys.executable, "-m", module), threads, device="assigned by ray")
        self._worker = engine.start(Path(folder), 0)

    def poll(self) -> int | None:
        return self._worker.poll()

    def stop(self) -> None:
        self._worker.stop()

    def kill(self) -> None:
        self._worker.kill()


class _RayWorkerHandle:
    sentinel = None

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor
        self._poll_ref = actor.poll.remote()

    def poll(self) -> int | None:
        ready, _ = self._ray.wait([self._poll_ref], timeout=0)
        if not ready:  # also while the actor waits for resources
            return None
        try:
            code: int | None = self._ray.get(self._poll_ref)
        except self._ray.exceptions.RayError:
            return WORKER_LOST
        if code is None:
            self._poll_ref = self._actor.poll.remote()
        else:
            self._ray.kill(self._actor)  # frees its resources
        return code

    def stop(self) -> None:
        self._actor.stop.remote()

    def kill(self) -> None:
        # the process first: it would survive its actor
        self._ray.wait([self._actor.kill.remote()], timeout=5)
        self._ray.kill(self._actor)


ENGINES: dict[EngineName, EngineFactory] = {"local": LocalEngine, "ray": RayEngine}
