"""Rows of text from JSONL, CSV, TSV and Parquet: which column holds it, and what to say of a bad row."""

from __future__ import annotations

import difflib
import io
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from qkflow.errors import InputError, unknown

TEXT_COLUMN_NAMES = ("text", "content", "article", "document", "story", "body", "abstract", "sentence")
MAX_LISTED_COLUMNS = 12  # columns named in an error, at most
LOOKAHEAD_ROWS = 100  # rows with text looked at before a column of no usual name is taken


def choose_column(
    columns: list[str], text_columns: list[str], requested_column: str | None, source: object
) -> str:
    """The column that holds the text: the one asked for, one of the usual names, or the only one of text."""
    if requested_column in columns:
        return requested_column
    if requested_column is not None:
        near = difflib.get_close_matches(requested_column, columns, n=MAX_LISTED_COLUMNS) or columns
        raise unknown(f"column of {source}", requested_column, near[:MAX_LISTED_COLUMNS])
    if not text_columns:
        raise InputError(
            f"{source} has no column of text, only {', '.join(columns[:MAX_LISTED_COLUMNS]) or 'empty rows'}"
        )
    usual = [name for name in TEXT_COLUMN_NAMES if name in text_columns]
    if not usual and len(text_columns) > 1:
        raise InputError(
            f"{source} has the columns {', '.join(text_columns[:MAX_LISTED_COLUMNS])}: "
            f"say which holds the text, as in {source}#{text_columns[0]}"
        )
    return (usual or text_columns)[0]


def require_text(value: object, source: object, column: str, row_number: int) -> str:
    if not isinstance(value, str):
        raise InputError(
            f"{source} row {row_number}: column '{column}' holds {type(value).__name__}, not text"
        )
    return value


def row_texts(
    rows: Iterable[tuple[int, Any]], requested_column: str | None, source: object, max_rows: int | None = None
) -> Iterator[str]:
    """The texts of numbered rows, objects or bare strings; rows whose column is missing or null are left out.

    The first row may lack the column, so it alone does not decide: rows are looked at until the column asked
    for, or one of a usual name, has been seen (`within` so many rows), and a column of another name is taken
    if it is the only one of text in the first AHEAD rows that have any.
    """
    rows = iter(rows)
    columns: dict[str, None] = {}
    texts: dict[str, None] = {}
    held: list[tuple[int, Any]] = []  # rows that may hold text
    for number, row in islice(rows, max_rows):
        if isinstance(row, str) and not held:
            yield row
            continue
        if isinstance(row, dict):
            columns.update(dict.fromkeys(row))
            texts.update(dict.fromkeys(name for name, value in row.items() if isinstance(value, str)))
        settled = (
            not texts.keys().isdisjoint(TEXT_COLUMN_NAMES)
            if requested_column is None
            else requested_column in columns
        )
        if settled or (requested_column is None and texts):
            held.append((number, row))
        if settled or len(held) == LOOKAHEAD_ROWS:
            break
    if columns:
        column = choose_column(list(columns), list(texts), requested_column, source)
        for number, row in chain(held, rows):
            value = row if isinstance(row, str) else row.get(column)
            if value is not None:
                yield require_text(value, source, column, number)


def jsonl_rows(stream: IO[bytes], path: Path) -> Iterator[tuple[int, Any]]:
    """One object or one string a line, with the line's number."""
    for number, line in enumerate(stream, start=1):
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except UnicodeDecodeError:
            raise  # of another encoding: said as it is of any text
        except (ValueError, RecursionError) as error:
            fault = "nested too deeply" if isinstance(error, RecursionError) else "not JSON"
            raise InputError(f"{path} line {number} is {fault}: one object a line is expected") from error
        if not isinstance(row, str | dict):
            raise InputError(
                f"{path} line {number} is a JSON {type(row).__name__}: one object a line is expected"
            )
        yield number, row


def csv_texts(stream: io.TextIOBase, path: Path, column: str | None, *, tab_separated: bool) -> Iterator[str]:
    """Rows under a line of column names; where `column` is a number (from 1), there is no such line."""
    import csv

    csv.field_size_limit(1 << 30)
    numbered = column is not None and column.isdigit()
    first = stream.readline()
    separator = "\t" if tab_separated else ","
    if not (tab_separated or numbered or "," in first):  # a header without commas shows what stands for them
        separator = next((mark for mark in ";\t|" if mark in first), ",")
    # TSV as data sets use it knows no quoting: a quotation mark is part of the text.
    rows = csv.reader(
        chain([first], stream),
        delimiter=separator,
        quoting=csv.QUOTE_NONE if tab_separated else csv.QUOTE_MINIMAL,
    )
    names = [] if numbered else next(rows, [])
    index = int(column or 0) - 1 if numbered else names.index(choose_column(names, names, column, path))
    width = len(names)
    for row in filter(None, rows):
        width = width or len(row)  # without a header, the first row tells
        if not 0 <= index < len(row):
            raise InputError(
                f"{path} line {rows.line_num} has {len(row)} columns: there is no number {index + 1}"
            )
        if any(row[width:]):  # to go on would be to cut a text short
            rule = (
                "no text may contain a tab"
                if tab_separated
                else f"quote each text that contains '{separator}'"
            )
            raise InputError(
                f"{path} line {rows.line_num} has {len(row)} columns, the first line {width}: {rule}"
            )
        yield row[index]


def parquet_texts(path: Path, column: str | None, advance: Callable[[int], None]) -> Iterator[str]:
    """Rows of a Parquet file; `advance(bytes)` is told how much of the file they stand for."""
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise InputError('reading Parquet needs pyarrow: pip install "qkflow[data]"') from error
    try:
        table = parquet.ParquetFile(path)
    except arrow.ArrowInvalid as error:
        raise InputError(f"{path} is not a Parquet file, or is damaged") from error
    schema = table.schema_arrow
    types = {field.name: field.type for field in schema}
    for name, kind in types.items():
        if arrow.types.is_dictionary(kind):  # categories of text are text
            types[name] = kind.value_type
    texts = [name for name in types if str(types[name]) in ("string", "large_string", "string_view")]
    chosen = choose_column(schema.names, texts, column, path)
    number, size = 0, path.stat().st_size
    for batch in table.iter_batches(batch_size=1024, columns=[chosen]):
        for value in batch.column(0).to_pylist():
            number += 1
            if value is not None:
                yield require_text(value, path, chosen, number)
        advance(size * batch.num_rows // table.metadata.num_rows)
