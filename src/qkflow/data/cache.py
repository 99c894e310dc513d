"""The cache of prepared sets: who may write, where, and how a set becomes visible all at once.

sets/KEY       finished sets; KEY is a digest of what went in (text, tokenizer, version of the rules), so
               that equal text is prepared once, wherever it lies
index/STAMP    which set belongs to files of a certain path, size and time, so that a second use reads nothing
locks/KEY      held by the process that prepares a set
staging/KEY.*  a set being written; one rename makes it visible, so that an interrupted preparation leaves
               nothing that looks finished
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qkflow import files
from qkflow.errors import InputError

_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def default_cache_dir() -> Path:
    """$QKFLOW_CACHE, or `qkflow` in the folder where this system keeps caches."""
    if given := os.environ.get("QKFLOW_CACHE"):
        return Path(given).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "qkflow"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "qkflow"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qkflow"


class TokenSetCache:
    def __init__(self, folder: Path | None = None) -> None:
        self.folder = Path(folder) if folder is not None else default_cache_dir()

    def token_set_dir(self, key: str) -> Path:
        return self.folder / "sets" / key

    def lookup(self, stamp: str) -> Path | None:
        """The folder of the set that was last prepared from what has this stamp."""
        try:
            return self.token_set_dir(
                json.loads((self.folder / "index" / f"{stamp}.json").read_bytes())["set"]
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None  # not there, or damaged: then it is written again

    def add_to_index(self, stamp: str, key: str) -> None:
        """Remember a set under a stamp, if the cache can be written to."""
        with suppress(OSError):  # it saves reading the source again, no more
            files.write_json(self.folder / "index" / f"{stamp}.json", {"set": key})

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Hold a set's lock, waiting for another process that does."""
        from filelock import FileLock, Timeout

        with self._translate_os_errors():
            (self.folder / "locks").mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.folder / "locks" / f"{key}.lock")
            try:
                lock.acquire(timeout=1)
            except Timeout:
                log_to_stderr("another process is preparing the same corpus: waiting for it")
                lock.acquire()
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def staging_dir(self, key: str) -> Iterator[Path]:
        """A folder to write a set into; it takes its place when the block ends without an error.

        The lock of `key` must be held.
        """
        with self._translate_os_errors():
            self._remove_stale_staging(key)
            staging = self.folder / "staging" / f"{key}.{secrets.token_hex(4)}"
            staging.mkdir(parents=True)
            try:
                yield staging
                target = self.token_set_dir(key)
                target.parent.mkdir(exist_ok=True)
                if target.exists():  # damaged, or it would not be made again
                    target.rename(staging.with_name(f"{key}.{secrets.token_hex(4)}"))
                staging.rename(target)
                files.fsync_folder(target.parent)
                self._remove_stale_staging(key)
            finally:
                shutil.rmtree(staging, ignore_errors=True)

    def _remove_stale_staging(self, key: str) -> None:
        """Remove what interrupted preparations left: of this set, and of any set that nobody prepares now."""
        from filelock import FileLock, Timeout

        for leftover in (self.folder / "staging").glob("*"):
            other = leftover.name.partition(".")[0]
            if other == key:
                shutil.rmtree(leftover, ignore_errors=True)
                continue
            try:
                with FileLock(self.folder / "locks" / f"{other}.lock", timeout=0):
                    shutil.rmtree(leftover, ignore_errors=True)
            except Timeout:
                continue

    @contextmanager
    def _translate_os_errors(self) -> Iterator[None]:
        """Turn the system's refusal to write into the sentence a user can act on."""
        try:
            yield
        except OSError as error:
            elsewhere = "set QKFLOW_CACHE to a folder"
            if error.errno in _DISK_FULL_ERRNOS:
                raise InputError(
                    f"no space left for the cache {self.folder}: free some, or {elsewhere} with more"
                ) from error
            if str(error.filename or "").startswith(str(self.folder)):
                raise InputError(
                    f"cannot write to the cache {self.folder} ({error.strerror}): {elsewhere} you can write"
                ) from error
            raise


def log_to_stderr(message: str) -> None:
    """Say something on stderr that is neither a result nor an error."""
    print(f"qkflow: {message}", file=sys.stderr)
