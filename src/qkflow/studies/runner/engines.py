"""Where runs are run: as processes here, or spread over machines by Ray.

An engine starts one worker process per run; all they share with the study is the run's folder. The exit code
says how it ended: 0 done, 75 stopped on request with its state saved, 2 bad input, anything else a failure.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from qkflow.errors import InputError
from qkflow.system import process_cpu_count

WORKER_ARGS = ("-m", "qkflow.training.worker")
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 75
RUN_LOCKED = -1001  # not started: another process still works in the run's folder
WORKER_LOST = -1002  # the machine that ran it is gone


class WorkerHandle(Protocol):
    """A worker at work; `poll` gives its exit code, or BUSY or LOST, once there is one."""

    def poll(self) -> int | None: ...
    def stop(self) -> None: ...
    def kill(self) -> None: ...


class Engine(Protocol):
    def default_jobs(self) -> int: ...
    def start(self, folder: Path, slot: int) -> WorkerHandle: ...
    def close(self) -> None: ...


def cuda_device_count(device: str) -> int:
    """How many CUDA devices there are to share out, if they are wanted."""
    if device not in ("auto", "cuda"):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


class LocalWorker:
    """One worker as a process of this machine."""

    def __init__(self, command: Sequence[str], folder: Path, env: dict[str, str]) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        with _run_lock(folder / ".lock") as (free, inherited), open(folder / "log.txt", "ab") as log:
            if free:
                self._process = subprocess.Popen(
                    [*command, str(folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **env},
                    # Ctrl-C in a terminal reaches the whole group: workers are stopped by us, once.
                    start_new_session=True,
                    pass_fds=inherited,
                )

    def poll(self) -> int | None:
        return RUN_LOCKED if self._process is None else self._process.poll()

    def stop(self) -> None:
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        if self._process and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@contextmanager
def _run_lock(path: Path) -> Iterator[tuple[bool, tuple[int, ...]]]:
    """Try for a run's lock: whether it was free, and the descriptor for the worker to inherit.

    The worker holds the lock through that descriptor for as long as it lives, even when whoever started it is
    killed: a comparison started again waits for such an orphan instead of training beside it.
    """
    try:
        import fcntl
    except ImportError:  # Windows has no inheritable locks
        yield True, ()
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = True
    except BlockingIOError:
        free = False
    try:
        yield free, (descriptor,)
    finally:
        os.close(descriptor)


class LocalEngine:
    """Single-thread processes side by side: at these sizes n of them beat one process with n threads."""

    def __init__(self, command: Sequence[str] | None = None, threads: int = 1, device: str = "auto") -> None:
        self.command = tuple(command or (sys.executable, *WORKER_ARGS))
        self.threads = threads
        self.n_gpus = cuda_device_count(device)

    def default_jobs(self) -> int:
        return self.n_gpus or max(1, process_cpu_count() // self.threads)

    def start(self, folder: Path, slot: int) -> WorkerHandle:
        environment = {name: str(self.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        if self.n_gpus:
            environment["CUDA_VISIBLE_DEVICES"] = str(slot % self.n_gpus)
        return LocalWorker(self.command, folder, environment)

    def close(self) -> None:
        pass


class RayEngine:
    """The same workers, placed by Ray on the machines of a cluster, which must share the study's folder."""

    def __init__(self, command: Sequence[str] | None = None, threads: int = 1, device: str = "auto") -> None:
        try:
            import ray
        except ImportError:
            raise InputError('--engine ray needs Ray: pip install "qkflow[ray]"') from None
        self.ray: Any = ray
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            ray.init(log_to_driver=False, configure_logging=False)
        resources = ray.cluster_resources()
        self.threads = threads
        self._n_gpus = int(resources.get("GPU", 0)) if device in ("auto", "cuda") else 0
        self._n_cpus = int(resources.get("CPU", 1))
        placed = ray.remote(num_cpus=threads, num_gpus=1 if self._n_gpus else 0)
        # On a node the interpreter is the node's own, so the default command is made there.
        self._actor = placed(_RayWorker)
        self.command = tuple(command) if command else None

    def default_jobs(self) -> int:
        return self._n_gpus or max(1, self._n_cpus // self.threads)

    def start(self, folder: Path, slot: int) -> WorkerHandle:
        return _RayWorkerHandle(
            self.ray, self._actor.remote(self.command, self.threads, str(folder.resolve()))
        )

    def close(self) -> None:
        if self._owns_ray:
            self.ray.shutdown()


class _RayWorker:
    """Lives on a node: starts the worker there as the local engine would, and keeps hold of it."""

    def __init__(self, command: Sequence[str] | None, threads: int, folder: str) -> None:
        engine = LocalEngine(command, threads, device="placed by Ray")
        self._worker = engine.start(Path(folder), 0)

    def poll(self) -> int | None:
        return self._worker.poll()

    def stop(self) -> None:
        self._worker.stop()

    def kill(self) -> None:
        self._worker.kill()


class _RayWorkerHandle:
    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor
        self._poll_ref = actor.poll.remote()

    def poll(self) -> int | None:
        """Never waits: an actor that has not found its place yet simply has not answered."""
        ready, _ = self._ray.wait([self._poll_ref], timeout=0)
        if not ready:
            return None
        try:
            code: int | None = self._ray.get(self._poll_ref)
        except self._ray.exceptions.RayError:
            return WORKER_LOST
        if code is None:
            self._poll_ref = self._actor.poll.remote()
        else:
            self._ray.kill(self._actor)  # gives its place to the next
        return code

    def stop(self) -> None:
        self._actor.stop.remote()

    def kill(self) -> None:
        self._ray.wait([self._actor.kill.remote()], timeout=5)  # the worker first: it outlives its actor
        self._ray.kill(self._actor)


ENGINES: dict[str, Callable[[Sequence[str] | None, int, str], Engine]] = {
    "local": LocalEngine,
    "ray": RayEngine,
}
