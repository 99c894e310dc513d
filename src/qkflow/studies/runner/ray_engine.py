"""Runs on the machines of a Ray cluster, which share the study's folder.

One actor per run at a time holds CPUs and GPUs of its node. It starts workers as the local engine does, from
a server that has imported torch, and executes one run after the other. A run whose actor is lost, with its
worker or its node, resumes from its last checkpoint wherever there is room.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any

from qkflow.errors import InputError, join_limited
from qkflow.files import write_atomic
from qkflow.studies.config import ExecutionConfig
from qkflow.studies.runner.engines import (
    WORKER_LOST,
    WORKER_MODULE,
    LocalEngine,
    Retries,
    WorkerHandle,
)
from qkflow.studies.runner.ray_cluster import check_reachable, connect
from qkflow.studies.runner.study_dir import LOG_FILE
from qkflow.training.run_dir import EXIT_FAILED, EXIT_INTERRUPTED

PROBE_TIMEOUT = 60.0  # seconds for a node to start a Python process
POLL_INTERVAL = 0.2  # seconds, of an actor
STOP_TIMEOUT = 5.0
FORWARDED = "QKFLOW_"  # environment variables of the study that workers get


class RayEngine:
    """Workers on the nodes of a Ray cluster: that of --address, one that runs here, or a new local one."""

    retries = Retries(lost=20, failed=1)
    has_queue = False

    def __init__(
        self,
        execution: ExecutionConfig,
        device: str = "auto",
        *,
        command: Sequence[str] | None = None,
        module: str = WORKER_MODULE,
    ) -> None:
        try:
            import ray
        except ImportError:
            raise InputError(
                '--engine ray needs Ray: pip install "qkflow[ray]"', code="missing-dependency"
            ) from None
        self.ray: Any = ray
        if execution.address is not None:
            check_reachable(execution.address)
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            connect(ray, execution.address)
        self._idle: list[Any] = []  # actors
        self._waiting: list[_RayRun] = []  # for an actor
        try:
            self._set_resources(execution, device)
        except BaseException:
            self.close()
            raise
        self._actor_arguments = {
            "env": {key: value for key, value in os.environ.items() if key.startswith(FORWARDED)},
            "cwd": os.getcwd(),
            "command": tuple(command) if command else None,
            "threads": execution.threads,
            "module": module,
            "processes": execution.processes_per_run,
        }

    def _set_resources(self, execution: ExecutionConfig, device: str) -> None:
        processes = execution.processes_per_run
        nodes = self._nodes()
        has_gpus = device in ("auto", "cuda") and any(node["Resources"].get("GPU") for node in nodes)
        self.cpus = execution.cpus_per_run or execution.threads * processes
        self.gpus = execution.gpus_per_run
        if self.gpus is None:
            self.gpus = processes if has_gpus else 0
        if not self.default_jobs():
            sizes = (f"{n['Resources'].get('CPU', 0):g} and {n['Resources'].get('GPU', 0):g}" for n in nodes)
            raise InputError(
                f"no node of the cluster has {self.cpus:g} CPUs and {self.gpus:g} GPUs for a run, they have "
                f"{join_limited(sorted(set(sizes)))}: change --cpus-per-run or --gpus-per-run",
                code="no-fitting-node",
            )

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self.ray.nodes() if node["Alive"]]

    def default_jobs(self) -> int:
        """Return how many runs fit on all nodes."""
        return sum(
            min(
                int(node["Resources"].get(kind, 0) // need)
                for kind, need in (("CPU", self.cpus), ("GPU", self.gpus))
                if need
            )
            for node in self._nodes()
        )

    def check_folder(self, folder: Path) -> None:
        """Write a token into the folder, and let every node read it."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        token = secrets.token_hex(8)
        path = folder.absolute() / f".probe-{token}"
        write_atomic(path, token)
        probe = self.ray.remote(num_cpus=0, max_retries=0)(_make_probe())
        try:
            reads = {
                probe.options(
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                ).remote(str(path)): node["NodeName"]
                for node in self._nodes()
            }
            done, _ = self.ray.wait(list(reads), num_returns=len(reads), timeout=PROBE_TIMEOUT)
            without = sorted(reads[ref] for ref in reads if ref not in done or not self._read(ref, token))
        finally:
            path.unlink(missing_ok=True)
        if without:
            raise InputError(
                f"{join_limited(without)} cannot read {folder.absolute()}: the nodes of the cluster need a "
                "shared file system; put --out there",
                code="folder-not-shared",
            )

    def _read(self, ref: Any, token: str) -> bool:
        try:
            return bool(self.ray.get(ref) == token)
        except self.ray.exceptions.RayError:  # the node was lost: no run will be placed there
            return True

    def start(self, folder: Path, slot: int) -> WorkerHandle:
        run = _RayRun(self, folder.absolute())
        if self._idle:
            run.use(self._idle.pop())
        else:
            self._waiting.append(run)
        return run

    def new_actor(self) -> Any:
        remote = self.ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, max_concurrency=3)
        return remote(_NodeWorker).remote(**self._actor_arguments)

    def release(self, actor: Any) -> None:
        """Give an actor to the run that waits the longest; the cluster may be too full for one of its own."""
        if self._waiting:
            self._waiting[0].use(actor)
        else:
            self._idle.append(actor)

    def placed(self, run: _RayRun) -> None:
        if run in self._waiting:
            self._waiting.remove(run)

    def close(self) -> None:
        for actor in self._idle:
            self.ray.kill(actor)
        self._idle.clear()
        if self._owns_ray:
            self.ray.shutdown()


def _make_probe() -> Any:
    """Return the function that a node executes. Ray sends a nested function as code, without imports."""

    def read_token(path: str) -> str | None:
        try:
            with open(path, encoding="utf-8") as file:
                return file.read()
        except OSError:
            return None

    return read_token


class _NodeWorker:
    """Ray actor that executes runs on its node, one at a time."""

    def __init__(
        self,
        env: dict[str, str],
        cwd: str,
        command: Sequence[str] | None,
        threads: int,
        module: str,
        processes: int,
    ) -> None:
        os.environ.update(env)
        if os.path.isdir(cwd):  # relative paths of corpora
            os.chdir(cwd)
        self._engine = LocalEngine(
            command,
            threads,
            device="assigned by ray",
            module=module,
            processes=processes,
            owns_workers=True,
        )
        self._request: str | None = None

    def ready(self) -> None:
        pass

    def run(self, folder: str) -> int:
        """Execute the run in `folder`. Return its exit code."""
        self._request = None
        worker = self._engine.start(Path(folder), 0)
        while (code := worker.poll()) is None:
            if self._request == "stop":
                worker.stop()
                self._request = None
            elif self._request == "kill":
                worker.kill()
            elif worker.sentinel is None:
                time.sleep(POLL_INTERVAL)
            else:
                connection.wait([worker.sentinel], POLL_INTERVAL)
        return code

    def request(self, what: str) -> None:
        """Stop or kill the worker that runs."""
        self._request = what


class _RayRun:
    """The handle of a run. It waits until an actor is placed on a node, then executes there."""

    sentinel = None

    def __init__(self, engine: RayEngine, folder: Path) -> None:
        self._engine, self._ray, self._folder = engine, engine.ray, folder
        self._actor: Any = None
        self._ready: Any = None
        self._result: Any = None
        self._is_stopped = False  # before it was placed

    def use(self, actor: Any) -> None:
        """Execute on an actor that is placed, instead of the own one that waits for resources."""
        if self._actor is not None:
            self._ray.kill(self._actor)
        self._actor = actor
        self._execute()

    def _execute(self) -> None:
        self._engine.placed(self)
        self._result = self._actor.run.remote(str(self._folder))

    def poll(self) -> int | None:
        if self._is_stopped:
            return EXIT_INTERRUPTED
        errors = self._ray.exceptions
        try:
            if self._actor is None:
                self._actor = self._engine.new_actor()
                self._ready = self._actor.ready.remote()
            if self._result is None:
                if not self._is_done(self._ready):
                    return None
                self._ray.get(self._ready)
                self._execute()
            if not self._is_done(self._result):
                return None
            code: int = self._ray.get(self._result)
        except errors.RayTaskError as error:  # an exception in the actor
            return self._fail(str(error).strip().splitlines()[-1])
        except errors.RayError as error:
            if getattr(error, "actor_init_failed", False):
                return self._fail(str(error).strip().splitlines()[-1])
            self._drop_actor()
            self._log(str(error).strip().splitlines()[0])
            return WORKER_LOST
        self._engine.release(self._actor)
        return code

    def _fail(self, reason: str) -> int:
        self._drop_actor()
        self._log(reason)
        return EXIT_FAILED

    def _log(self, reason: str) -> None:
        with open(self._folder / LOG_FILE, "a", encoding="utf-8") as log:
            log.write(f"{reason}\n")

    def _is_done(self, ref: Any) -> bool:
        ready, _ = self._ray.wait([ref], timeout=0)
        return bool(ready)

    def _drop_actor(self) -> None:
        self._engine.placed(self)
        if self._actor is not None:
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(self._actor)

    def stop(self) -> None:
        if self._result is None:
            self._is_stopped = True
            self._drop_actor()
        else:
            self._actor.request.remote("stop")

    def kill(self) -> None:
        if self._result is not None:
            self._actor.request.remote("kill")
            self._ray.wait([self._result], timeout=STOP_TIMEOUT)
        self._drop_actor()
