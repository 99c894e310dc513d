"""Read rows of JSONL, CSV, TSV and Parquet, and choose the column that holds the text."""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, BinaryIO

from qkflow.data.readers.inflation import check_inflation
from qkflow.errors import InputError, unknown
from qkflow.plain_data import iter_lines, load_json

TEXT_COLUMN_NAMES = ("text", "content", "article", "document", "story", "body", "abstract", "sentence")
MAX_LISTED_COLUMNS = 12  # columns listed in an error
PARQUET_ROWS = 128  # per read: a file of a kilobyte may hold rows of megabytes
LOOKAHEAD_ROWS = 100  # rows with text to read before accepting a column that is not in TEXT_COLUMN_NAMES


def choose_column(
    columns: list[str], text_columns: list[str], requested_column: str | None, source: object
) -> str:
    """Return the text column: the requested one, one of TEXT_COLUMN_NAMES, or the only column of strings."""
    if requested_column in columns:
        return requested_column
    if requested_column is not None:
        near = difflib.get_close_matches(requested_column, columns, n=MAX_LISTED_COLUMNS) or columns
        raise unknown(f"column of {source}", requested_column, near[:MAX_LISTED_COLUMNS])
    if not text_columns:
        listed = ", ".join(columns[:MAX_LISTED_COLUMNS]) or "empty rows"
        raise InputError(f"{source} has no column of text among its columns: {listed}", code="no-text-column")
    usual = [name for name in TEXT_COLUMN_NAMES if name in text_columns]
    if not usual and len(text_columns) > 1:
        raise InputError(
            f"{source} has several columns of text ({', '.join(text_columns[:MAX_LISTED_COLUMNS])}): "
            f"name one, as in {source}#{text_columns[0]}",
            code="ambiguous-text-column",
        )
    return (usual or text_columns)[0]


def require_text(value: object, source: object, column: str, row_number: int) -> str:
    """Return `value` if it is a string, else raise."""
    if not isinstance(value, str):
        raise InputError(
            f"{source} row {row_number}: column '{column}' holds {type(value).__name__}, not text",
            code="column-not-text",
        )
    return value


def row_texts(
    rows: Iterable[tuple[int, Any]], requested_column: str | None, source: object, max_rows: int | None = None
) -> Iterator[str]:
    """Yield the texts of numbered rows (objects or strings). Skip rows without a value in the text column.

    The first row may lack the text column, so rows are buffered until the requested column, or one of
    TEXT_COLUMN_NAMES, has occurred, for `max_rows` rows at most. Another column is accepted if it is the only
    column of strings in the first LOOKAHEAD_ROWS rows that have one.
    """
    rows = iter(rows)
    columns: dict[str, None] = {}
    text_columns: dict[str, None] = {}
    buffered: list[tuple[int, Any]] = []  # rows that may hold text
    for number, row in islice(rows, max_rows):
        if isinstance(row, str) and not buffered:
            yield row
            continue
        if isinstance(row, dict):
            columns.update(dict.fromkeys(row))
            text_columns.update(dict.fromkeys(name for name, value in row.items() if isinstance(value, str)))
        decided = (
            not text_columns.keys().isdisjoint(TEXT_COLUMN_NAMES)
            if requested_column is None
            else requested_column in columns
        )
        if decided or (requested_column is None and text_columns):
            buffered.append((number, row))
        if decided or len(buffered) == LOOKAHEAD_ROWS:
            break
    if columns:
        column = choose_column(list(columns), list(text_columns), requested_column, source)
        for number, row in chain(buffered, rows):
            value = row if isinstance(row, str) else row.get(column)
            if value is not None:
                yield require_text(value, source, column, number)


def jsonl_rows(stream: BinaryIO, path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (line number, object or string) of every line that is not blank."""
    for number, line in enumerate(iter_lines(stream, path), start=1):
        if line.isspace():
            continue
        try:
            row = load_json(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError:
            raise  # `open_binary` reports it
        except (ValueError, RecursionError) as error:
            fault = "nested too deeply" if isinstance(error, RecursionError) else "not JSON"
            raise InputError(
                f"{path} line {number} is {fault}: JSONL has one JSON object per line", code="invalid-json"
            ) from error
        if not isinstance(row, str | dict):
            raise InputError(
                f"{path} line {number} is a JSON {type(row).__name__}: JSONL has one JSON object per line",
                code="json-not-object",
            )
        yield number, row


def delimited_rows(
    lines: Iterable[str], separator: str, *, tab_separated: bool
) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, cells) of every row of CSV or TSV that is not empty.

    `tab_separated` files have no quoting, as datasets use them: a quotation mark is part of the text.
    """
    csv.field_size_limit(1 << 30)
    reader = csv.reader(
        lines, delimiter=separator, quoting=csv.QUOTE_NONE if tab_separated else csv.QUOTE_MINIMAL
    )
    for cells in reader:
        if cells:
            yield reader.line_num, cells


def csv_texts(stream: IO[str], path: Path, column: str | None, *, tab_separated: bool) -> Iterator[str]:
    """Yield the text column of every row. The first row has the column names, unless `column` is a number
    (from 1)."""
    numbered = column is not None and re.fullmatch("[0-9]{1,9}", column) is not None
    first = stream.readline()
    separator = "\t" if tab_separated else ","
    if not (tab_separated or numbered or "," in first):  # a header without commas shows the separator
        separator = next((mark for mark in ";\t|" if mark in first), ",")
    rows = delimited_rows(chain([first], stream), separator, tab_separated=tab_separated)
    _, names = (0, []) if numbered else next(rows, (0, []))
    index = int(column or 0) - 1 if numbered else names.index(choose_column(names, names, column, path))
    n_columns = len(names)
    for line_number, row in rows:
        n_columns = n_columns or len(row)  # without a header, that of the first row
        if not 0 <= index < len(row):
            raise InputError(
                f"{path} line {line_number} has {len(row)} columns: there is no column {index + 1}",
                code="column-out-of-range",
            )
        if any(row[n_columns:]):  # the text would be truncated silently
            remedy = (
                "a TSV text cannot contain a tab"
                if tab_separated
                else f"quote each text that contains '{separator}'"
            )
            raise InputError(
                f"{path} line {line_number} has {len(row)} columns, the first line {n_columns}: {remedy}",
                code="too-many-columns",
            )
        yield row[index]


def parquet_texts(path: Path, column: str | None, advance: Callable[[int], None]) -> Iterator[str]:
    """Yield the text column of a Parquet file; call `advance(n)` after each n bytes of the file."""
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise InputError(
            'reading Parquet needs pyarrow: pip install "qkflow[data]"', code="missing-dependency"
        ) from error
    try:
        yield from _column_texts(parquet.ParquetFile(path), path, column, advance)
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if getattr(error, "errno", None) is not None:  # of the disk; those of pyarrow have none
            raise
        raise InputError(f"{path} is not a Parquet file, or is corrupt", code="corrupt-parquet") from error


def _column_texts(
    table: Any, path: Path, column: str | None, advance: Callable[[int], None]
) -> Iterator[str]:
    from pyarrow.types import is_dictionary

    types = {field.name: field.type for field in table.schema_arrow}
    for name, kind in types.items():
        if is_dictionary(kind):  # dictionary-encoded strings
            types[name] = kind.value_type
    text_columns = [name for name in types if str(types[name]) in ("string", "large_string", "string_view")]
    chosen = choose_column(table.schema_arrow.names, text_columns, column, path)
    number = n_bytes = 0
    size, n_rows = path.stat().st_size, max(1, table.metadata.num_rows)
    for batch in table.iter_batches(batch_size=PARQUET_ROWS, columns=[chosen]):
        n_bytes += batch.nbytes
        check_inflation(path, n_bytes)
        for value in batch.column(0).to_pylist():
            number += 1
            if value is not None:
                yield require_text(value, path, chosen, number)
        advance(size * batch.num_rows // n_rows)
