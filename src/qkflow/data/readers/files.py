"""One file on disk, and the documents in it. Everything streams, whatever the size of the file."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from qkflow.data.readers import documents, tables
from qkflow.errors import InputError, unknown

READING = 2  # part of every cache key: raise it when the same file gives other documents than before

KINDS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".rst": "text",
    ".tex": "text",
}
COMPRESSED = (".gz", ".bz2", ".xz")


def kind_of(path: Path) -> str | None:
    """How a file is read, by its name; None where the name does not tell."""
    if path.suffix.lower() in COMPRESSED:
        path = Path(path.stem)
    return KINDS.get(path.suffix.lower())


class Meter:
    """How many bytes of the source have been read so far: written by one thread, shown by another."""

    def __init__(self) -> None:
        self.done = 0

    def advance(self, count: int) -> None:
        self.done += count


class MeteredFile(io.FileIO):
    meter: Meter

    def readinto(self, buffer: Any, /) -> int | None:
        count = super().readinto(buffer)
        self.meter.advance(count or 0)
        return count


@dataclass(frozen=True)
class SourceFile:
    path: Path
    kind: str  # a value of KINDS
    part: str  # which of the splits it belongs to, see `qkflow.data.splits`
    whole: bool = False  # a text without marks is one document

    def documents(self, column: str | None, meter: Meter) -> Iterator[str]:
        """The documents in order, none longer than `documents.LONGEST`, none of whitespace alone."""
        try:
            for text in self._texts(column, meter):
                for piece in documents.cut([text], None) if len(text) > documents.LONGEST else (text,):
                    if piece and not piece.isspace():
                        yield piece
        except (EOFError, zlib.error, lzma.LZMAError) as error:
            raise InputError(f"{self.path} cannot be decompressed: it is cut short or damaged") from error
        except OSError as error:
            if error.errno is not None:
                raise
            raise InputError(
                f"{self.path} cannot be decompressed: {error}"
            ) from error  # gzip's and bz2's own
        except UnicodeDecodeError as error:
            raise InputError(
                f"{self.path} is not UTF-8 text (byte 0x{error.object[error.start]:02x}): "
                "convert it first, for example with `iconv -f latin1 -t utf-8`"
            ) from error

    def _texts(self, column: str | None, meter: Meter) -> Iterator[str]:
        if self.kind == "parquet":
            yield from documents.articles(tables.parquet_rows(self.path, column, meter.advance))
            return
        if self.kind == "text" and column not in (None, *documents.UNITS):
            raise unknown(f"unit of the plain text {self.path}", str(column), documents.UNITS)
        with self._open(meter) as stream:
            if self.kind == "jsonl":
                rows = tables.jsonl_rows(stream, self.path)
                yield from documents.articles(tables.row_texts(rows, column, self.path))
                return
            if b"\0" in stream.peek(8192)[:8192]:
                raise InputError(f"{self.path} is binary, not UTF-8 text, JSONL, CSV, TSV or Parquet")
            # "utf-8-sig" drops a byte-order mark; every line end becomes "\n"
            text = io.TextIOWrapper(stream, encoding="utf-8-sig")
            if self.kind in ("csv", "tsv"):
                yield from tables.csv_rows(text, self.path, column, tabs=self.kind == "tsv")
            else:
                size = self.path.stat().st_size
                yield from documents.documents(text.read, size, unit=column, whole=self.whole)

    def _open(self, meter: Meter) -> io.BufferedReader:
        raw = MeteredFile(self.path)
        raw.meter = meter
        buffered = io.BufferedReader(raw, 1 << 20)
        kinds: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
        open_compressed = kinds.get(self.path.suffix.lower())
        # What the three return reads and peeks as a BufferedReader does, without being one.
        return cast(io.BufferedReader, open_compressed(buffered, "rb") if open_compressed else buffered)
