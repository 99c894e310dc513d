"""Writing to disk so that a reader never sees a half-written file: write beside, fsync, rename."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from qkflow.errors import InputError


@contextmanager
def atomic_open(path: str | Path) -> Iterator[BinaryIO]:
    """Open a binary file that takes `path`'s place only when the block ends without an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        with open(beside, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def write_atomic(path: str | Path, content: bytes | str) -> None:
    with atomic_open(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: str | Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def make_folder(folder: Path) -> None:
    """Make a folder that the user named, with its parents."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be written ({error.strerror}): give another folder") from None


def fsync_folder(folder: str | Path) -> None:
    """Make renames inside `folder` durable (a no-op where folders cannot be opened)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
