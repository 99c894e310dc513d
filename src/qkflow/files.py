"""Atomic writes and full disks. A reader never sees a half-written file or folder."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from qkflow.errors import InputError

MAX_NAME_BYTES = 255  # of a file name, on all common file systems
_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFullError(OSError):
    """A file does not fit on its disk. The message says what to do."""


def is_disk_full(error: BaseException) -> bool:
    """Return whether a write failed for lack of space: a full disk, a quota, or the largest file size."""
    full = isinstance(error, OSError) and error.errno in _DISK_FULL_ERRNOS
    return full or isinstance(error, DiskFullError)


@contextmanager
def atomic_open(path: str | Path) -> Iterator[BinaryIO]:
    """Open a binary file that replaces `path` only if the block ends without an error."""
    path = Path(path)
    if path.is_dir():  # the root of a file system has no name
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    # of a name that is as long as names may be only the start
    temporary = path.with_name(f".{path.name[:40]}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):  # of a read-only folder
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            error.filename = str(path)  # not the temporary file; a write to a full disk names none
        raise
    fsync_folder(path.parent)


def write_atomic(path: str | Path, content: bytes | str) -> None:
    with atomic_open(path) as file:
        # a name that is not UTF-8 is shown with escapes
        file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)


def write_json(path: str | Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def check_file_name(kind: str, name: object) -> str:
    """Return `name` if it names a file or folder below another one; raise InputError otherwise.

    Names come from files of others: one such as `../../x` must not leave the folder.
    """
    text = str(name)
    if not isinstance(name, str) or not text or text in (".", "..") or re.search(r"[/\\\0]", text):
        raise InputError(f"{kind} '{text[:100]}' is not a file name", code="unsafe-name")
    if len(text.encode(errors="surrogatepass")) > MAX_NAME_BYTES:
        raise InputError(f"{kind} '{text[:40]}…' is longer than a file name", code="unsafe-name")
    return text


def expand_user(path: str | Path) -> Path:
    """Return a path with `~` replaced by the home directory."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise InputError(
            f"the home directory in '{path}' cannot be found: write the whole path", code="home-not-found"
        ) from None


def home() -> Path:
    """Return the home directory. A container may run with a user id that has none."""
    try:
        return Path.home()
    except RuntimeError:
        raise InputError(
            "this user has no home directory for the cache: set QKFLOW_CACHE to a folder", code="no-home"
        ) from None


def make_folder(folder: Path) -> None:
    """Create a folder that the user chose, with its parents."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot write to {folder} ({error.strerror}): choose another folder", code="folder-not-writable"
        ) from None


def staging_path(final: Path) -> Path:
    """Return the hidden sibling in which the folder `final` is written before `commit_folder`."""
    return final.with_name(f".{final.name}.part")


@contextmanager
def staging_folder(final: Path, staging: Path | None = None) -> Iterator[Path]:
    """Create a folder that replaces `final` only if the block ends without an error.

    `staging` (default: a hidden sibling) must be on the same file system as `final`; whatever an earlier,
    killed process left there is removed first.
    """
    staging = staging or staging_path(final)
    shutil.rmtree(staging, ignore_errors=True)
    make_folder(staging)
    try:
        yield staging
        commit_folder(staging, final)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def commit_folder(staging: Path, final: Path) -> None:
    """Make `staging` durable and rename it to `final`; an older `final` is removed."""
    for path in staging.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        else:
            fsync_folder(path)
    fsync_folder(staging)
    if final.exists():
        remove_folder(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    os.replace(staging, final)
    fsync_folder(final.parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder, or a file or link in its place. It disappears as a whole: it is renamed first."""
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink()
        return
    hidden = folder.with_name(f".{folder.name}.old.part")
    shutil.rmtree(hidden, ignore_errors=True)
    os.replace(folder, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def fsync_folder(folder: str | Path) -> None:
    """Make renames inside `folder` durable; does nothing where folders cannot be opened (Windows)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
