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

READER_VERSION = 2  # part of every cache key: raise it when the same file gives other documents than before

FORMAT_BY_SUFFIX = {
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
COMPRESSION_SUFFIXES = (".gz", ".bz2", ".xz")


def detect_format(path: Path) -> str | None:
    """How a file is read, by its name; None where the name does not tell."""
    if path.suffix.lower() in COMPRESSION_SUFFIXES:
        path = Path(path.stem)
    return FORMAT_BY_SUFFIX.get(path.suffix.lower())


class ReadProgress:
    """How many bytes of the source have been read so far: written by one thread, shown by another."""

    def __init__(self) -> None:
        self.bytes_read = 0

    def advance(self, count: int) -> None:
        self.bytes_read += count


class ProgressFile(io.FileIO):
    progress: ReadProgress

    def readinto(self, buffer: Any, /) -> int | None:
        count = super().readinto(buffer)
        self.progress.advance(count or 0)
        return count


@dataclass(frozen=True)
class SourceFile:
    path: Path
    file_format: str  # a value of KINDS
    source_split: str  # which of the splits it belongs to, see `qkflow.data.splits`
    single_document: bool = False  # a text without marks is one document

    def iter_documents(self, column: str | None, progress: ReadProgress) -> Iterator[str]:
        """The documents in order, none longer than `documents.LONGEST`, none of whitespace alone."""
        try:
            for text in self._iter_texts(column, progress):
                for piece in (
                    documents.split_text([text], None)
                    if len(text) > documents.MAX_DOCUMENT_CHARS
                    else (text,)
                ):
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

    def _iter_texts(self, column: str | None, progress: ReadProgress) -> Iterator[str]:
        if self.file_format == "parquet":
            yield from documents.join_wikitext_articles(
                tables.parquet_texts(self.path, column, progress.advance)
            )
            return
        if self.file_format == "text" and column not in (None, *documents.UNITS):
            raise unknown(f"unit of the plain text {self.path}", str(column), documents.UNITS)
        with self._open(progress) as stream:
            if self.file_format == "jsonl":
                rows = tables.jsonl_rows(stream, self.path)
                yield from documents.join_wikitext_articles(tables.row_texts(rows, column, self.path))
                return
            if b"\0" in stream.peek(8192)[:8192]:
                raise InputError(f"{self.path} is binary, not UTF-8 text, JSONL, CSV, TSV or Parquet")
            # "utf-8-sig" drops a byte-order mark; every line end becomes "\n"
            text = io.TextIOWrapper(stream, encoding="utf-8-sig")
            if self.file_format in ("csv", "tsv"):
                yield from tables.csv_texts(text, self.path, column, tab_separated=self.file_format == "tsv")
            else:
                size = self.path.stat().st_size
                yield from documents.split_documents(
                    text.read, size, unit=column, single_document=self.single_document
                )

    def _open(self, progress: ReadProgress) -> io.BufferedReader:
        raw = ProgressFile(self.path)
        raw.progress = progress
        buffered = io.BufferedReader(raw, 1 << 20)
        kinds: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
        open_compressed = kinds.get(self.path.suffix.lower())
        # What the three return reads and peeks as a BufferedReader does, without being one.
        return cast(io.BufferedReader, open_compressed(buffered, "rb") if open_compressed else buffered)
