"""The Ray engine on a real cluster of two nodes, on loopback: workers and nodes are killed mid-run."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from input_errors import raises_code
from qkflow.studies import compare
from qkflow.studies.config import ExecutionConfig
from qkflow.studies.grid import RunSpec
from qkflow.studies.runner import build_engine, ray_cluster
from qkflow.studies.runner.engines import Engine, LocalEngine
from qkflow.studies.runner.execution import execute_runs
from qkflow.studies.runner.ray_cluster import AUTH_MODE, WORKER_NICENESS, _start_local, connect
from qkflow.studies.runner.ray_engine import RayEngine
from qkflow.studies.runner.study_dir import RunDir, StudyDir
from toy_study import TOY, WORKER

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_log_monitor": False}


def sleepy_runs() -> list[RunSpec]:
    """Two runs of twenty steps of 0.1 s: long enough to be killed."""
    return [
        RunSpec(
            "compare",
            "sleepy@gpt2",
            seed,
            0.3,
            640,
            {
                "model": {"attention": {"coupling": "sleepy"}, "init": "gpt2"},
                "data": {"seq_len": 8},
                "train": {"seed": seed, "lr": 0.3, "batch_size": 4, "tokens": 640, "evaluations": 2},
            },
        )
        for seed in (0, 1)
    ]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with one CPU each. Ray would replace 127.0.0.1 by an address that others reach."""
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        environment.setenv("RAY_AUTH_MODE", "disabled")  # no token in the home of the user
        cluster = start_cluster()
        environment.setenv("RAY_ADDRESS", cluster.address)
        try:
            yield cluster
        finally:
            cluster.shutdown()


def start_cluster(attempts: int = 3) -> Any:
    """Start the cluster; Ray gives a node 30 seconds, which may not do on a busy machine."""
    from ray.cluster_utils import Cluster

    head = {**NODE, "node_ip_address": "127.0.0.2", "include_dashboard": False, "no_monitor": True}
    cluster = Cluster(shutdown_at_exit=True)
    try:
        cluster.add_node(**head)
        cluster.add_node(**NODE, node_ip_address="127.0.0.3")
    except Exception:
        cluster.shutdown()
        if attempts == 1:
            raise
        return start_cluster(attempts - 1)
    return cluster


@pytest.fixture(scope="module")
def engine(cluster: Any) -> Iterator[Engine]:
    engine = build_engine(ExecutionConfig("ray"), command=WORKER)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def expected_losses(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Losses of the local engine, undisturbed."""
    trackers = execute_runs(
        "toy", sleepy_runs(), StudyDir(tmp_path_factory.mktemp("local")), LocalEngine(WORKER), 2
    )
    return [tracker.loss for tracker in trackers]


def training_pids(folder: Path) -> list[int]:
    """Wait until two runs have trained three steps; return the process ids of their workers, newest first.

    The older one may have finished by then.
    """
    deadline = time.monotonic() + 400
    while True:
        runs = list(folder.glob("runs/*"))
        if len(runs) == 2 and all(len(RunDir(run).metrics().get("train", [])) >= 3 for run in runs):
            starts = sorted((run / "starts.txt" for run in runs), key=lambda path: -path.stat().st_mtime_ns)
            return [int(path.read_text().split()[0]) for path in starts]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def first_steps(folder: Path) -> list[list[int]]:
    """Return the first step of every worker, by run, the run with the fewest workers first."""
    starts = [path.read_text().splitlines() for path in folder.glob("runs/*/starts.txt")]
    return sorted(([int(line.split()[-1]) for line in lines] for lines in starts), key=len)


def descendants(pid: int) -> list[int]:
    """Return the process ids of all that a process has started."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    children = [child for child, parent in parents.items() if parent == pid]
    return [*children, *(each for child in children for each in descendants(child))]


def disturbed_losses(engine: Engine, folder: Path, disturb: Callable[[list[int]], object]) -> list[Any]:
    """Return the losses of two runs on the cluster; `disturb` gets the process ids of their workers."""
    with ThreadPoolExecutor(1) as pool:
        disturbed = pool.submit(lambda: disturb(training_pids(folder)))
        trackers = execute_runs("toy", sleepy_runs(), StudyDir(folder), engine)
        disturbed.result()
    return [tracker.loss for tracker in trackers]


def test_killed_worker_resumes(engine: Engine, tmp_path: Path, expected_losses: list[Any]) -> None:
    assert engine.default_jobs() == 2
    losses = disturbed_losses(engine, tmp_path, lambda pids: os.kill(pids[0], signal.SIGKILL))
    assert losses == expected_losses
    undisturbed, killed = first_steps(tmp_path)
    assert undisturbed == [0]
    assert killed[0] == 0
    assert killed[1] >= 2  # from a checkpoint


def test_folder_that_nodes_do_not_share(engine: Engine, tmp_path: Path) -> None:
    descriptor = os.dup2(os.open(tmp_path, os.O_RDONLY), 900)  # a path that means nothing to other processes
    folder = Path(f"/proc/self/fd/{descriptor}/s")
    with raises_code("folder-not-shared") as error:
        compare("toy", out=folder, engine="ray", **TOY, variants="sleepy", inits="gpt2")
    os.close(descriptor)
    assert "127.0.0.2" in str(error.value)
    assert not (tmp_path / "s" / "runs").exists()
    assert not list((tmp_path / "s").glob(".probe*"))


def test_run_that_fits_on_no_node(engine: Engine) -> None:
    with raises_code("no-fitting-node"):
        build_engine(ExecutionConfig("ray", cpus_per_run=2))
    with raises_code("no-fitting-node"):
        build_engine(ExecutionConfig("ray", gpus_per_run=1))


def test_failing_program_is_retried_once(engine: Engine, tmp_path: Path) -> None:
    (run, _) = sleepy_runs()
    run.config["model"]["attention"]["coupling"] = "broken"
    (tracker,) = execute_runs("toy", [run], StudyDir(tmp_path), engine)
    assert (tracker.status, tracker.times_failed) == ("failed", 2)
    assert "the toy exploded" in tracker.message
    assert first_steps(tmp_path) == [[0, 0]]


def test_killed_node(cluster: Any, engine: Engine, tmp_path: Path, expected_losses: list[Any]) -> None:
    """The last test on the cluster: one node is left, which then executes both runs."""

    def kill_node(pids: list[int]) -> None:
        (node,) = cluster.worker_nodes
        (raylet,) = node.all_processes["raylet"]
        for pid in [raylet.process.pid, *descendants(raylet.process.pid)]:
            os.kill(pid, signal.SIGKILL)
        cluster.remove_node(node, allow_graceful=False)

    assert disturbed_losses(engine, tmp_path, kill_node) == expected_losses
    undisturbed, lost = first_steps(tmp_path)
    assert undisturbed == [0]
    assert len(lost) == 2
    assert lost[1] >= 2


def test_cluster_out_of_reach() -> None:
    pytest.importorskip("ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with raises_code("cluster-out-of-reach"):
        build_engine(ExecutionConfig("ray", address=address))
    with raises_code("invalid-address"):
        build_engine(ExecutionConfig("ray", address="head-node"))


def test_server_that_is_not_rays(monkeypatch: pytest.MonkeyPatch) -> None:
    """E.g. the port of the dashboard; Ray itself would wait and warn for minutes."""
    pytest.importorskip("ray")
    monkeypatch.setattr(ray_cluster, "CONNECT_TIMEOUT", 3.0)
    with listening_address() as address, raises_code("cluster-out-of-reach"):
        connect(SimpleNamespace(), address)


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("RPC error: InvalidAuthToken: Authentication token is missing", "cluster-needs-token"),
        ("Version mismatch: Ray: 2.40.0", "cluster-out-of-reach"),
    ],
)
def test_cluster_that_refuses(reason: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "_CONNECT", f"import sys; sys.exit({reason!r})")
    with listening_address() as address, raises_code(code):
        connect(SimpleNamespace(), address)


@contextmanager
def listening_address() -> Iterator[str]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_local_cluster_keeps_the_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray reads the environment when it starts; by default its workers give way to all other processes."""
    seen = []
    ray = SimpleNamespace(init=lambda **options: seen.append(os.environ.get(WORKER_NICENESS)))
    for name in (WORKER_NICENESS, AUTH_MODE):
        monkeypatch.setenv(name, "")  # restored at the end
    monkeypatch.delenv(WORKER_NICENESS)
    _start_local(ray)
    monkeypatch.setenv(WORKER_NICENESS, "7")
    _start_local(ray)
    assert seen == ["0", "7"]


def test_missing_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with raises_code("missing-dependency"):
        RayEngine(ExecutionConfig("ray"))
