"""Tables: JSONL, CSV, TSV and Parquet give the texts of one column, or an error that names the row."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from input_errors import raises_code
from qkflow.data import corpora
from qkflow.data.readers import inflation, tables
from qkflow.data.readers.files import ReadProgress
from qkflow.errors import InputError


def read_texts(name: str | Path) -> list[str]:
    return [text for _, text in corpora.resolve(str(name)).iter_documents(ReadProgress())]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """The same three rows in every table format."""
    table = [{"id": i, "title": f"t{i}", "text": f'row "{i}", é'} for i in range(3)]
    lines = "".join(json.dumps(row) + "\n" for row in table)
    (tmp_path / "rows.jsonl").write_text(lines)
    (tmp_path / "rows.json").write_text(lines + "\n")
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "rows.jsonl.bz2").write_bytes(bz2.compress(lines.encode()))
    (tmp_path / "rows.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    (tmp_path / "rows.csv").write_text(
        "id,title,text\n" + "".join(f't,t{i},"row ""{i}"", é"\n' for i in range(3))
    )
    (tmp_path / "rows.tsv").write_text(
        "\ufeffid\ttitle\ttext\n" + "".join(f't\tt{i}\trow "{i}", é\n' for i in range(3))
    )
    parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "rows.parquet")
    return tmp_path


@pytest.mark.parametrize(
    "kind", ["jsonl", "json", "jsonl.gz", "jsonl.bz2", "jsonl.xz", "csv", "tsv", "parquet"]
)
def test_row_is_a_document_and_column_can_be_chosen(rows: Path, kind: str) -> None:
    assert read_texts(rows / f"rows.{kind}") == [f'row "{i}", é' for i in range(3)]
    assert read_texts(f"{rows / 'rows'}.{kind}#title") == ["t0", "t1", "t2"]
    with raises_code("unknown-column"):
        read_texts(f"{rows / 'rows'}.{kind}#titel")


def test_dictionary_encoded_strings_are_text(tmp_path: Path) -> None:
    kinds = pyarrow.array(["one", "two", None, "one"]).dictionary_encode()
    numbers = pyarrow.array([1, 2, 2, 1]).dictionary_encode()
    parquet.write_table(pyarrow.table({"kind": kinds, "number": numbers}), tmp_path / "a.parquet")
    assert read_texts(tmp_path / "a.parquet") == ["one", "two", "one"]


def test_column_number_without_header(tmp_path: Path) -> None:
    (tmp_path / "cola.tsv").write_text("gj\t1\t\tFirst.\ngj\t0\t*\tSecond.\n")
    assert read_texts(f"{tmp_path}/cola.tsv#4") == ["First.", "Second."]
    with raises_code("column-out-of-range"):
        read_texts(f"{tmp_path}/cola.tsv#9")


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_separator_from_header(tmp_path: Path, separator: str) -> None:
    rows = ["id,text", "1,one; two", '2,"three, four"', "3,five,"]
    (tmp_path / "a.csv").write_text("\n".join(rows))
    assert read_texts(tmp_path / "a.csv") == ["one; two", "three, four", "five"]
    rows = [f"id{separator}text", f"1{separator}one, two, three", f'2{separator}"four{separator} five"']
    (tmp_path / "a.csv").write_text("\n".join(rows))
    assert read_texts(tmp_path / "a.csv") == ["one, two, three", f"four{separator} five"]


@pytest.mark.parametrize(
    ("name", "content", "values"),
    [
        ("a.csv", "text\none\ntwo, three\n", ["line 3", "2 columns", "','"]),
        ("a.csv", "id;text\n1;one\n2;two; three\n", ["line 3", "3 columns", "';'"]),
        ("a.csv#2", "1,one\n2,two, three\n", ["line 2", "3 columns"]),
        ("a.tsv", "id\ttext\n1\tone\ttwo\n", ["line 2", "3 columns", "tab"]),
    ],
)
def test_row_with_too_many_columns(tmp_path: Path, name: str, content: str, values: list[str]) -> None:
    (tmp_path / name[:5]).write_text(content)
    with raises_code("too-many-columns") as raised:
        read_texts(tmp_path / name)
    assert all(value in str(raised.value) for value in values)


def test_column_and_file_names_may_contain_a_hash(tmp_path: Path) -> None:
    (tmp_path / "msr.tsv").write_text("#1 String\t#2 String\nFirst.\tSecond.\n")
    assert read_texts(f"{tmp_path}/msr.tsv##2 String") == ["Second."]
    assert read_texts(f"{tmp_path}/*.tsv##1 String") == ["First."]
    (tmp_path / "c#.txt").write_text("sharp\n")
    assert read_texts(f"{tmp_path}/c#.txt") == ["sharp\n"]
    assert read_texts(f"{tmp_path}/c#.txt#lines") == ["sharp"]
    (tmp_path / "wide.jsonl").write_text(json.dumps({f"c{i}": i for i in range(1000)}))
    with raises_code("no-text-column") as raised:
        read_texts(tmp_path / "wide.jsonl")
    assert "c0, c1" in str(raised.value)
    assert len(str(raised.value)) < 300


def test_rows_without_text_are_skipped_and_invalid_rows_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"text": "one"}\n{"text": null}\n{"other": 1}\n{"text": "  "}\n"bare"\n'
    )
    assert read_texts(tmp_path / "a.jsonl") == ["one", "bare"]
    for bad, (code, value) in {
        '{"text": 5}': ("no-text-column", "text"),
        '{"text": "x"}\n{"text": 5}': ("column-not-text", "row 2"),
        "[1]": ("json-not-object", "line 1"),
        '{"text": "x"}\n{"text"': ("invalid-json", "line 2"),
        '{"a": "x", "b": "y"}': ("ambiguous-text-column", "#a"),
    }.items():
        (tmp_path / "bad.jsonl").write_text(bad)
        with raises_code(code) as raised:
            read_texts(tmp_path / "bad.jsonl")
        assert value in str(raised.value)


@pytest.mark.parametrize(
    "first",
    [['{"id": 0}'] * 150, ['{"id": 0, "text": null}'], ['{"id": "a"}'], ['{"id": "a", "text": null}', "{}"]],
    ids=["missing", "null", "another text", "another text and null"],
)
def test_text_column_may_be_missing_in_first_rows(tmp_path: Path, first: list[str]) -> None:
    rows = [json.dumps({"id": f"b{i}", "text": f"row {i}"}) for i in range(3)]
    (tmp_path / "a.jsonl").write_text("\n".join([*first, *rows]))
    for name in ("a.jsonl", "a.jsonl#text"):
        assert read_texts(tmp_path / name) == ["row 0", "row 1", "row 2"]
    with raises_code("unknown-column"):
        read_texts(tmp_path / "a.jsonl#tekst")


def test_unusual_column_must_be_the_only_text(tmp_path: Path) -> None:
    rows = [json.dumps({"id": i, "prompt": f"row {i}"}) for i in range(tables.LOOKAHEAD_ROWS + 5)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    assert read_texts(tmp_path / "a.jsonl") == [f"row {i}" for i in range(tables.LOOKAHEAD_ROWS + 5)]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows[:9], '{"prompt": "a", "answer": "b"}']))
    with raises_code("ambiguous-text-column"):
        read_texts(tmp_path / "a.jsonl")


@pytest.mark.parametrize("column", ["²", "9" * 5000])
def test_column_that_looks_like_a_number(tmp_path: Path, column: str) -> None:
    (tmp_path / "a.csv").write_text("id,text\n1,a\n")
    with raises_code("unknown-column"):
        read_texts(f"{tmp_path / 'a.csv'}#{column}")


def test_damaged_parquet_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    binary = pyarrow.array([b"\xff\xfe text"] * 4)
    text = pyarrow.Array.from_buffers(pyarrow.string(), 4, binary.cast(pyarrow.binary()).buffers())
    parquet.write_table(pyarrow.table({"text": text}), path)
    with raises_code("corrupt-parquet"):
        read_texts(path)
    parquet.write_table(pyarrow.table({"text": [f"text {n}" for n in range(500)]}), path)
    content, generator = path.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(200):
        damaged = bytearray(content)
        for _ in range(4):
            damaged[generator.randrange(4, len(damaged))] = generator.randrange(256)
        path.write_bytes(bytes(damaged))
        try:
            read_texts(path)
        except InputError:
            refused += 1
    assert refused > 20


def test_small_files_that_inflate_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflation, "MIN_BYTES", 1 << 20)
    text = "the same words again " * 200_000
    for suffix, compress in ((".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)):
        (tmp_path / f"a.txt{suffix}").write_bytes(compress(text.encode()))
        with raises_code("inflates-too-much"):
            read_texts(tmp_path / f"a.txt{suffix}")
    parquet.write_table(pyarrow.table({"text": [text] * 300}), tmp_path / "a.parquet", compression="zstd")
    with raises_code("inflates-too-much"):
        read_texts(tmp_path / "a.parquet")
