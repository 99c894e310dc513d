"""Cache of token sets on disk. A set appears there in one rename, under a lock.

sets/KEY      finished sets; KEY is a hash of the text, the tokenizer and the versions of our formats, so that
              equal text is prepared once, whatever its path
index/STAMP   the set of files with a given path, size and time, so that a second use reads nothing
locks/KEY     held by the process that prepares a set
staging/KEY   a set that is being written
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from qkflow import files
from qkflow.errors import InputError, printable
from qkflow.locks import lock_folder
from qkflow.plain_data import read_json


def default_cache_dir() -> Path:
    """Return $QKFLOW_CACHE, or `qkflow` in the user's cache folder."""
    if path := os.environ.get("QKFLOW_CACHE"):
        return files.expand_user(path)
    if sys.platform == "darwin":
        return files.home() / "Library" / "Caches" / "qkflow"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or files.home()) / "qkflow"
    return Path(os.environ.get("XDG_CACHE_HOME") or files.home() / ".cache") / "qkflow"


class TokenSetCache:
    def __init__(self, folder: Path | None = None) -> None:
        self.folder = Path(folder) if folder is not None else default_cache_dir()

    def token_set_dir(self, key: str) -> Path:
        return self.folder / "sets" / key

    def lookup(self, stamp: str) -> Path | None:
        """Return the folder of the set that was last prepared from a source with this stamp, or None."""
        try:
            entry = read_json(self.folder / "index" / f"{stamp}.json")
            return self.token_set_dir(files.check_file_name("the set", entry["set"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None  # missing or corrupt: it is written again

    def add_to_index(self, stamp: str, key: str) -> None:
        """Record the set of a stamp. Do nothing if the cache is read-only: the index only saves time."""
        with suppress(OSError):
            files.write_json(self.folder / "index" / f"{stamp}.json", {"set": key})

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Hold the lock of a set. Wait if another process holds it."""
        with ExitStack() as stack:
            with self._translate_os_errors():
                locks = self.folder / "locks"
                locks.mkdir(parents=True, exist_ok=True)
                stack.enter_context(lock_folder(locks, f"{key}.lock", on_wait=_log_waiting))
            yield

    @contextmanager
    def staging_dir(self, key: str) -> Iterator[Path]:
        """Create a folder that becomes the set `key` if the block ends without an error.

        The lock of `key` must be held.
        """
        with self._translate_os_errors():
            self._remove_stale_staging(key)
            staging = self.folder / "staging" / key
            staging.parent.mkdir(parents=True, exist_ok=True)
            with files.staging_folder(self.token_set_dir(key), staging):
                yield staging

    def _remove_stale_staging(self, key: str) -> None:
        """Remove what killed processes left of this set, and of any set whose lock is free."""
        for leftover in (self.folder / "staging").glob("*"):
            other = leftover.name.partition(".")[0]  # older versions wrote KEY.RANDOM
            with ExitStack() as stack:
                if other != key:
                    try:
                        stack.enter_context(lock_folder(self.folder / "locks", f"{other}.lock"))
                    except InputError:  # in use
                        continue
                shutil.rmtree(leftover, ignore_errors=True)

    @contextmanager
    def _translate_os_errors(self) -> Iterator[None]:
        """Raise `InputError` for a full disk, and for a cache that cannot be written to."""
        try:
            yield
        except OSError as error:
            if files.is_disk_full(error):
                raise InputError(
                    f"no space left for the cache {self.folder}: free some, or set QKFLOW_CACHE to a folder "
                    "on another disk",
                    code="disk-full",
                ) from error
            if str(error.filename or "").startswith(str(self.folder)):
                raise InputError(
                    f"cannot write to the cache {self.folder} ({error.strerror}): set QKFLOW_CACHE to "
                    "another folder",
                    code="cache-not-writable",
                ) from error
            raise


def file_stamps(paths: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Return (absolute path, size, time of last change) of each file."""
    return [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]


def log_to_stderr(message: str) -> None:
    """Print a message that is neither a result nor an error."""
    print(f"qkflow: {printable(message)}", file=sys.stderr)


def _log_waiting() -> None:
    log_to_stderr("another process is preparing the same corpus: waiting for it")
