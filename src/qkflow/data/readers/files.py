"""Read the documents of one file. Everything streams, so memory does not grow with the file."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkflow.data.readers import documents, tables
from qkflow.data.readers.inflation import InflatedFile
from qkflow.errors import InputError, unknown

READER_VERSION = 2  # in every cache key: increase it when a file gives other documents than before

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
_OPEN_COMPRESSED: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_MAGIC = {".gz": b"\x1f\x8b", ".bz2": b"BZh", ".xz": b"\xfd7zXZ\0"}


def detect_format(path: Path) -> str | None:
    """Return a file's format by its suffix, without that of a compression; None if it is unknown."""
    if path.suffix.lower() in _OPEN_COMPRESSED:
        path = Path(path.stem)
    return FORMAT_BY_SUFFIX.get(path.suffix.lower())


class ReadProgress:
    """Count of source bytes read so far. One thread writes it; another may show it."""

    def __init__(self) -> None:
        self.bytes_read = 0

    def advance(self, count: int) -> None:
        self.bytes_read += count


class ProgressFile(io.FileIO):
    """Raw file that counts the bytes read from it."""

    progress: ReadProgress

    def readinto(self, buffer: Any, /) -> int | None:
        count = super().readinto(buffer)
        self.progress.advance(count or 0)
        return count


@contextmanager
def open_binary(path: Path, progress: ReadProgress | None = None) -> Iterator[io.BufferedReader[Any]]:
    """Open a file, decompressed by its suffix. Raise `InputError` if it is corrupt or not UTF-8."""
    raw = ProgressFile(path)
    raw.progress = progress or ReadProgress()
    buffered = io.BufferedReader(raw, 1 << 20)
    open_compressed = _OPEN_COMPRESSED.get(path.suffix.lower())
    try:
        if open_compressed is None:
            yield buffered
        else:
            with open_compressed(buffered, "rb") as stream:
                yield io.BufferedReader(InflatedFile(stream, path), 1 << 20)
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise InputError(
            f"{path} cannot be decompressed: it is truncated or corrupt", code="corrupt-compressed-file"
        ) from error
    except OSError as error:
        if error.errno is not None:  # gzip and bz2 raise OSError without one
            raise
        raise InputError(f"{path} cannot be decompressed: {error}", code="corrupt-compressed-file") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text (byte 0x{error.object[error.start]:02x}): "
            "convert it first, for example with `iconv -f latin1 -t utf-8`",
            code="not-utf8",
        ) from error
    finally:
        buffered.close()


def as_text(stream: io.BufferedReader[Any]) -> io.TextIOWrapper:
    """Decode UTF-8, drop a byte-order mark, and turn every line end into a newline."""
    return io.TextIOWrapper(stream, encoding="utf-8-sig")


@dataclass(frozen=True)
class SourceFile:
    """A file of a corpus."""

    path: Path
    file_format: str  # a value of FORMAT_BY_SUFFIX
    source_split: str  # a split, or UNSPLIT or UNSPLIT_TRAIN of `qkflow.data.splits`
    single_document: bool = False  # a plain text without separators is one document

    def iter_documents(self, column: str | None, progress: ReadProgress) -> Iterator[str]:
        """Yield the documents in order: at most MAX_DOCUMENT_CHARS long, none of whitespace only."""
        for text in self._iter_texts(column, progress):
            too_long = len(text) > documents.MAX_DOCUMENT_CHARS
            for piece in documents.split_text([text], None) if too_long else (text,):
                if piece and not piece.isspace():
                    yield piece

    def _iter_texts(self, column: str | None, progress: ReadProgress) -> Iterator[str]:
        if self.file_format == "parquet":
            texts = tables.parquet_texts(self.path, column, progress.advance)
            yield from documents.join_wikitext_articles(texts)
            return
        if self.file_format == "text" and column not in (None, *documents.UNITS):
            raise unknown(f"unit of the plain text {self.path}", str(column), documents.UNITS)
        with open_binary(self.path, progress) as stream:
            if self.file_format == "jsonl":
                rows = tables.jsonl_rows(stream, self.path)
                yield from documents.join_wikitext_articles(tables.row_texts(rows, column, self.path))
                return
            _refuse_binary(self.path, stream.peek(8192))
            text = as_text(stream)
            if self.file_format in ("csv", "tsv"):
                yield from tables.csv_texts(text, self.path, column, tab_separated=self.file_format == "tsv")
            else:
                n_bytes = self.path.stat().st_size
                yield from documents.split_documents(
                    text.read, n_bytes, unit=column, single_document=self.single_document
                )


def check_start(file: SourceFile, start: bytes) -> None:
    """Raise InputError if a file whose first bytes are `start` does not have the format of its name."""
    suffix = file.path.suffix.lower()
    if start and not start.startswith(_MAGIC.get(suffix, b"")):
        raise InputError(
            f"{file.path} cannot be decompressed: it is not a {suffix} file", code="corrupt-compressed-file"
        )
    if suffix in _OPEN_COMPRESSED:
        return
    if file.file_format == "parquet":
        if start and not start.startswith(b"PAR1"):
            raise InputError(f"{file.path} is not a Parquet file, or is corrupt", code="corrupt-parquet")
    elif file.file_format != "jsonl":
        _refuse_binary(file.path, start)
    elif start.startswith(b"\0"):
        raise InputError(f"{file.path} line 1 is not JSON: it begins with NUL", code="invalid-json")


def _refuse_binary(path: Path, start: bytes) -> None:
    if b"\0" in start[:8192]:
        raise InputError(
            f"{path} is a binary file: convert it to UTF-8 text, JSONL, CSV, TSV or Parquet",
            code="binary-file",
        )
