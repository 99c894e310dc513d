"""Refuse a small file that decompresses to a huge one, before it fills the disk or the memory."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from qkflow.errors import InputError

MAX_INFLATION = 200  # text compresses by a factor of 3 to 10, logs by up to 50
MIN_BYTES = 64 << 20  # less is harmless


def check_inflation(path: Path, n_bytes: int) -> None:
    """Raise InputError if `n_bytes` of content so far are too many for the size of the file."""
    if n_bytes > MIN_BYTES and n_bytes > MAX_INFLATION * path.stat().st_size:
        raise InputError(
            f"{path} has more than {MAX_INFLATION} times its size once decompressed, unlike text: decompress "
            "it first if this is meant",
            code="inflates-too-much",
        )


class InflatedFile(io.RawIOBase):
    """The decompressed content of a file, checked while it is read."""

    def __init__(self, stream: Any, path: Path) -> None:
        self.stream, self.path, self.n_bytes = stream, path, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        count: int = self.stream.readinto(buffer)
        self.n_bytes += count
        check_inflation(self.path, self.n_bytes)
        return count
