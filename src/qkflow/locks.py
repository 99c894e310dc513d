"""Folder locks, with host, process and heartbeat of the holder in a file beside the lock.

`flock` excludes processes of one machine. Not every network file system passes it on to the others, so the
holder also names itself in a file and touches it every few seconds. A holder on another machine counts as
alive until its heartbeat is `STALE_AFTER` seconds old; then its lock may be taken over. On the same machine
`flock` alone decides.
"""

from __future__ import annotations

import errno
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from qkflow.errors import InputError
from qkflow.files import make_folder, write_json

# Network and user-space file systems without locks answer with one of these.
_NO_LOCKS_ERRNOS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
HEARTBEAT_INTERVAL = 10.0  # seconds
STALE_AFTER = 60.0
_MAX_OWNER_BYTES = 1 << 16
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
        from qkflow.plain_data import has_layout, read_json

        try:
            values = read_json(path, _MAX_OWNER_BYTES)
        except (OSError, InputError):
            return None
        if not has_layout(values, {"host": str, "machine": str, "pid": int, "token": str}):
            return None
        return cls(**{name: values[name] for name in cls.__dataclass_fields__})


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
    make_folder(folder)
    owner_path = owner_file(folder, filename)
    descriptor = os.open(folder / filename, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if on_wait is not None:
            _wait_for_lock(descriptor, on_wait)
            yield
            return
        if not try_lock(descriptor):
            raise _locked(folder, LockOwner.read(owner_path))
        if (owner := find_remote_owner(owner_path)) is not None:
            raise _locked(folder, owner)
        with own_lock(owner_path):
            yield
    finally:
        os.close(descriptor)  # releases the lock


def try_lock(descriptor: int) -> bool:
    """Lock an open file until it is closed. Return False if another process holds the lock.

    Where the file system has no locks, return True with a warning: nothing then keeps a second process out.
    """
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS_ERRNOS:
            _warn_without_locks(error.strerror or "")
            return True
        if error.errno in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):
            return False
        raise
    return True


def _wait_for_lock(descriptor: int, on_wait: Callable[[], None]) -> None:
    """Wait until the lock is free; call `on_wait` after one second."""
    start, was_called = time.monotonic(), False
    while not try_lock(descriptor):
        if not was_called and time.monotonic() - start > 1:
            was_called = True
            on_wait()
        time.sleep(0.05)


@cache
def _warn_without_locks(reason: str) -> None:
    message = f"this file system has no locks ({reason}): do not start a second process in the same folder"
    print(f"qkflow: {message}", file=sys.stderr)


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
