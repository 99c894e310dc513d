from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from input_errors import raises_code
from qkflow import locks
from qkflow.locks import lock_folder


def _hold(folder: Path, held: object, release: object) -> None:
    with lock_folder(folder):
        held.set()  # type: ignore[attr-defined]
        release.wait(30)  # type: ignore[attr-defined]


def test_lock_folder_excludes_another_process(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(tmp_path / "folder", held, release))
    process.start()
    try:
        assert held.wait(30)
        with raises_code("folder-locked"), lock_folder(tmp_path / "folder"):
            pass
        waited = threading.Event()

        def on_wait() -> None:
            waited.set()
            release.set()

        with lock_folder(tmp_path / "folder", on_wait=on_wait):
            assert waited.is_set()
    finally:
        release.set()
        process.join()
    with lock_folder(tmp_path / "folder"):
        pass


def write_owner(folder: Path, age: float = 0.0, **changes: object) -> Path:
    """Write the owner file of a lock that another machine holds, `age` seconds after its last heartbeat."""
    path = locks.owner_file(folder, ".lock")
    path.write_text(json.dumps({"host": "node7", "machine": "other", "pid": 41, "token": "x", **changes}))
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_lock_of_another_machine_is_kept_while_its_heartbeat_is_fresh(tmp_path: Path) -> None:
    write_owner(tmp_path, locks.STALE_AFTER / 2)
    with raises_code("folder-locked"), lock_folder(tmp_path):
        pass


@pytest.mark.parametrize(("age", "machine"), [(2 * locks.STALE_AFTER, "other"), (0.0, locks.machine_id())])
def test_abandoned_lock_is_taken_over(age: float, machine: str, tmp_path: Path) -> None:
    path = write_owner(tmp_path, age, machine=machine)  # on this machine, flock tells that it is free
    with lock_folder(tmp_path):
        owner = locks.LockOwner.read(path)
        assert owner is not None
        assert (owner.pid, owner.machine) == (os.getpid(), locks.machine_id())
    assert not path.exists()


@pytest.mark.parametrize(
    "owner", ["{", "[" * 100_000, '{"host": "a", "machine": [], "pid": 1, "token": "x"}', None]
)
def test_damaged_owner_file_does_not_lock(owner: str | None, tmp_path: Path) -> None:
    path = locks.owner_file(tmp_path, ".lock")
    if owner is None:
        os.mkfifo(path)
    else:
        path.write_text(owner)
    with lock_folder(tmp_path):
        pass


def test_heartbeat_touches_the_owner_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_FIRST_CHECK", 0.01)
    with lock_folder(tmp_path):
        path = locks.owner_file(tmp_path, ".lock")
        os.utime(path, (0, 0))
        deadline = time.monotonic() + 10
        while path.stat().st_mtime == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_process_that_lost_its_lock_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_FIRST_CHECK", 0.05)
    stopped = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda number, frame: stopped.set())
    try:
        with lock_folder(tmp_path):
            path = write_owner(tmp_path)
            assert stopped.wait(10)
        assert path.exists()  # it belongs to the new owner
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_file_system_without_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    fcntl = pytest.importorskip("fcntl")

    def fail(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    for on_wait in (None, pytest.fail):
        with lock_folder(tmp_path, on_wait=on_wait):
            pass
    assert capsys.readouterr().err.count("has no locks") == 1
