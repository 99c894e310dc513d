"""The Ray engine on a real cluster of two nodes, on loopback: workers and nodes are killed mid-run."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from input_errors import raises_code
from qkflow.studies import compare
from qkflow.studies.config import ExecutionConfig
from qkflow.studies.runner import build_engine
from qkflow.studies.runner.ray_engine import RayEngine
from qkflow.studies.runner.study_dir import RunDir
from toy_study import TOY

# Two runs of `sleepy` with twenty steps of 0.1 s: long enough to be killed.
SETTINGS: dict[str, Any] = {**TOY, "variants": "sleepy", "inits": "gpt2", "seeds": 2, "verdict": False}
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_log_monitor": False}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with one CPU each. Ray would replace 127.0.0.1 by an address that others reach."""
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        environment.setenv("RAY_AUTH_MODE", "disabled")  # no token in the home of the user
        from ray.cluster_utils import Cluster

        head = {**NODE, "node_ip_address": "127.0.0.2", "include_dashboard": False, "no_monitor": True}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            cluster.add_node(**NODE, node_ip_address="127.0.0.3")
            environment.setenv("RAY_ADDRESS", cluster.address)
            yield cluster
        finally:
            cluster.shutdown()


@pytest.fixture(scope="module")
def expected_losses(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Losses of the local engine, undisturbed."""
    return losses(compare("toy", out=tmp_path_factory.mktemp("local") / "s", jobs=2, **SETTINGS))


def losses(comparison: Any) -> list[Any]:
    return [(run.cell, run.seed, run.result["loss"]) for run in comparison.compared_runs]


def start_lines(folder: Path) -> list[list[str]]:
    """Return process id and first step of every worker, by run."""
    return [path.read_text().splitlines() for path in sorted(folder.glob("runs/*/starts.txt"))]


def training_pids(folder: Path, least: int) -> list[int]:
    """Wait until `least` runs have trained three steps; return the process ids of their workers."""
    deadline = time.monotonic() + 120
    while True:
        pids = [
            int((run / "starts.txt").read_text().split()[0])
            for run in folder.glob("runs/sleepy*")
            if len(RunDir(run).metrics().get("train", [])) >= 3
        ]
        if len(pids) >= least:
            return pids
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def disturbed_losses(folder: Path, disturb: Callable[[list[int]], None]) -> list[Any]:
    """Return the losses of a study on the cluster; `disturb` gets the pids of its workers."""
    done: list[bool] = []

    def run() -> None:
        disturb(training_pids(folder, 2))
        done.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    comparison = compare("toy", out=folder, engine="ray", **SETTINGS)
    thread.join()
    assert done
    return losses(comparison)


def test_killed_worker_resumes(cluster: Any, tmp_path: Path, expected_losses: list[Any]) -> None:
    killed: list[int] = []

    def kill_one(pids: list[int]) -> None:
        killed.append(pids[0])
        os.kill(pids[0], signal.SIGKILL)

    assert disturbed_losses(tmp_path / "s", kill_one) == expected_losses
    (restarted,) = [lines for lines in start_lines(tmp_path / "s") if len(lines) == 2]
    assert restarted[0] == f"{killed[0]} from step 0"
    assert int(restarted[1].split()[-1]) >= 2  # from a checkpoint


def test_folder_that_nodes_do_not_share(cluster: Any, tmp_path: Path) -> None:
    # a path that means another folder in every process
    folder = Path("/proc/self/cwd") / os.path.relpath(tmp_path, Path.cwd())
    with raises_code("folder-not-shared") as error:
        compare("toy", out=folder / "s", engine="ray", **SETTINGS)
    assert "127.0.0.2" in str(error.value)
    assert not list((tmp_path / "s").glob("runs/*"))


def test_run_that_fits_on_no_node(cluster: Any) -> None:
    with raises_code("no-fitting-node"):
        build_engine(ExecutionConfig("ray", cpus_per_run=2))
    with raises_code("no-fitting-node"):
        build_engine(ExecutionConfig("ray", gpus_per_run=1))


def test_failing_program_is_retried_once(cluster: Any, tmp_path: Path) -> None:
    from qkflow.studies.grid import RunSpec
    from qkflow.studies.runner.execution import RunTracker, execute_runs
    from qkflow.studies.runner.study_dir import StudyDir

    config = {"train": {"batch_size": 1}, "data": {"seq_len": 10}}
    spec = RunSpec("compare", "broken@gpt2", 0, 1e-3, 100, config)
    code = "import sys; open(sys.argv[1] + '/starts.txt', 'a').write('x'); sys.exit('it broke')"
    engine = build_engine(ExecutionConfig("ray"), command=(sys.executable, "-c", code))
    try:
        (tracker,) = execute_runs("toy", [spec], StudyDir(tmp_path), engine)
    finally:
        engine.close()
    assert isinstance(tracker, RunTracker)
    assert (tracker.status, tracker.message) == ("failed", "it broke")
    assert (tracker.run_dir.path / "starts.txt").read_text() == "xx"


# last: it leaves one node
def test_killed_node(cluster: Any, tmp_path: Path, expected_losses: list[Any]) -> None:
    pids: list[int] = []

    def kill_node(found: list[int]) -> None:
        pids.extend(found)
        (node,) = cluster.worker_nodes
        cluster.remove_node(node, allow_graceful=False)

    assert disturbed_losses(tmp_path / "s", kill_node) == expected_losses
    restarted = [lines for lines in start_lines(tmp_path / "s") if len(lines) > 1]
    assert len(restarted) == 1
    assert int(restarted[0][-1].split()[-1]) >= 2
    assert not any(is_alive(pid) for pid in pids)


def test_cluster_out_of_reach() -> None:
    pytest.importorskip("ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with raises_code("cluster-out-of-reach"):
        build_engine(ExecutionConfig("ray", address=address))
    with raises_code("invalid-address"):
        build_engine(ExecutionConfig("ray", address="head-node"))


def test_missing_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with raises_code("missing-dependency"):
        RayEngine(ExecutionConfig("ray"))
