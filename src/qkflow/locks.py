"""Folder locks, with host, process and heartbeat of the holder in a file beside the lock.

`flock` excludes processes of one machine. Not every network file system passes it on to the others, so the
holder also names itself in a file and touches it every few seconds. A holder on another machine counts as
alive until its heartbeat is `STALE_AFTER` seconds old; then its lock may be taken over. On the same machine
`flock` alone decides.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from qkflow.errors import InputError
from qkflow.files import make_folder, write_json

HEARTBEAT_INTERVAL = 10.0  # seconds
STALE_AFTER = 60.0
_FIRST_CHECK = 1.0  # two machines that lock at the same moment: the earlier writer finds the other's name


@dataclass(frozen=True)
class LockOwner:
    """One holder of a lock."""

    host: str
    machine: str  # id of the running kernel, which containers share: `flock` works among them
    pid: int
    token: str

    @classmethod
    def of_this_process(cls) -> LockOwner:
        return cls(socket.gethostname(), machine_id(), os.getpid(), secrets.token_hex(8))

    @classmethod
    def read(cls, path: Path) -> LockOwner | None:
        """Return the holder that `path` names; None if there is none, or the file is damaged."""
        try:
            return cls(**json.loads(path.read_bytes()))
        except (OSError, ValueError, TypeError):
            return None


def machine_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return socket.gethostname()


@contextmanager
def lock_folder(
    folder: Path, filename: str = ".lock", *, on_wait: Callable[[], None] | None = None
) -> Iterator[None]:
    """Hold an exclusive lock on `folder`, created if missing, until the block ends or the process dies.

    If another process holds it, raise InputError (code `folder-locked`); on a shared file system also if that
    runs on another machine. With `on_wait`, call that after one second instead and wait, on this machine.
    """
    from filelock import FileLock, Timeout

    make_folder(folder)
    lock, owner_path = FileLock(folder / filename), owner_file(folder, filename)
    try:
        lock.acquire(timeout=0 if on_wait is None else 1)
    except Timeout:
        if on_wait is None:
            raise _locked(folder, LockOwner.read(owner_path)) from None
        on_wait()
        lock.acquire()
    try:
        if on_wait is not None:
            yield
            return
        if (owner := find_remote_owner(owner_path)) is not None:
            raise _locked(folder, owner)
        with own_lock(owner_path):
            yield
    finally:
        lock.release()


def _locked(folder: Path, owner: LockOwner | None) -> InputError:
    who = "another process" if owner is None else f"process {owner.pid} on {owner.host}"
    return InputError(f"{who} is using {folder}: wait for it, or choose another folder", code="folder-locked")


def owner_file(folder: Path, filename: str) -> Path:
    """Return the file that names the holder of the lock `filename`."""
    return folder / f"{filename}.owner"


def find_remote_owner(path: Path) -> LockOwner | None:
    """Return the holder in the owner file `path` if it is alive on another machine."""
    owner = LockOwner.read(path)
    if owner is None or owner.machine == machine_id():
        return None
    try:
        return owner if _age(path) < STALE_AFTER else None
    except FileNotFoundError:  # released since
        return None


def _age(path: Path) -> float:
    """Return the seconds since `path` was touched, by the clock of its file system: those of hosts differ."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".clock.") as file:
        return os.fstat(file.fileno()).st_mtime - path.stat().st_mtime


@contextmanager
def own_lock(path: Path) -> Iterator[LockOwner]:
    """Name this process in the owner file `path`, with a heartbeat, until the block ends.

    If another machine takes the lock over, because this process was suspended for long, send it SIGTERM.
    """
    owner, stop = LockOwner.of_this_process(), threading.Event()
    write_json(path, asdict(owner))
    thread = threading.Thread(target=_beat, args=(path, owner, stop), daemon=True, name="lock heartbeat")
    thread.start()
    try:
        yield owner
    finally:
        stop.set()
        thread.join()
        if LockOwner.read(path) == owner:
            path.unlink(missing_ok=True)


def _beat(path: Path, owner: LockOwner, stop: threading.Event) -> None:
    delay = _FIRST_CHECK
    while not stop.wait(delay):
        delay = HEARTBEAT_INTERVAL
        if LockOwner.read(path) not in (owner, None):
            os.kill(os.getpid(), signal.SIGTERM)
            return
        with suppress(OSError):  # the file system is away, or the folder was deleted
            os.utime(path)
