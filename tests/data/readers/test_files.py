"""Files of every kind give the documents that are in them, and say clearly what is wrong when they do not."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qkflow.data import corpora
from qkflow.data.readers import documents as documents_module
from qkflow.data.readers import tables
from qkflow.data.readers.files import ReadProgress
from qkflow.errors import InputError

WIKITEXT = """
 = First = 

 Text of the first .

 = = A section = =

 More .

 = Second = 

 Text of the second .
""".replace("= =\n", "= = \n")


def parts(name: str | Path) -> list[tuple[str, str]]:
    return list(corpora.resolve(str(name)).iter_documents(ReadProgress()))


def texts(name: str | Path) -> list[str]:
    return [text for _, text in parts(name)]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """The same three rows in every kind of table."""
    import pyarrow
    from pyarrow import parquet

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
def test_a_row_is_a_document_and_a_column_can_be_named(rows: Path, kind: str) -> None:
    assert texts(rows / f"rows.{kind}") == [f'row "{i}", é' for i in range(3)]
    assert texts(f"{rows / 'rows'}.{kind}#title") == ["t0", "t1", "t2"]
    with pytest.raises(InputError, match="did you mean 'title'"):
        texts(f"{rows / 'rows'}.{kind}#titel")


def test_categories_of_text_are_text(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    kinds = pyarrow.array(["one", "two", None, "one"]).dictionary_encode()
    numbers = pyarrow.array([1, 2, 2, 1]).dictionary_encode()
    parquet.write_table(pyarrow.table({"kind": kinds, "number": numbers}), tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet") == ["one", "two", "one"]


def test_tables_without_a_header_take_a_number(tmp_path: Path) -> None:
    (tmp_path / "cola.tsv").write_text("gj\t1\t\tFirst.\ngj\t0\t*\tSecond.\n")
    assert texts(f"{tmp_path}/cola.tsv#4") == ["First.", "Second."]
    with pytest.raises(InputError, match="there is no number 9"):
        texts(f"{tmp_path}/cola.tsv#9")


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_a_header_shows_what_separates_columns(tmp_path: Path, separator: str) -> None:
    rows = ["id,text", "1,one; two", '2,"three, four"', "3,five,"]
    (tmp_path / "a.csv").write_text("\n".join(rows))
    assert texts(tmp_path / "a.csv") == ["one; two", "three, four", "five"]
    rows = [f"id{separator}text", f"1{separator}one, two, three", f'2{separator}"four{separator} five"']
    (tmp_path / "a.csv").write_text("\n".join(rows))
    assert texts(tmp_path / "a.csv") == ["one, two, three", f"four{separator} five"]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.csv", "text\none\ntwo, three\n", "line 3 has 2 columns, .* line 1: quote each .* ','"),
        ("a.csv", "id;text\n1;one\n2;two; three\n", "line 3 has 3 columns, .* line 2: quote each .* ';'"),
        ("a.csv#2", "1,one\n2,two, three\n", "line 2 has 3 columns, the first line 2"),
        ("a.tsv", "id\ttext\n1\tone\ttwo\n", "line 2 has 3 columns, .* line 2: no text may contain a tab"),
    ],
)
def test_no_text_of_a_row_is_cut_short(tmp_path: Path, name: str, content: str, sentence: str) -> None:
    (tmp_path / name[:5]).write_text(content)
    with pytest.raises(InputError, match=sentence):
        texts(tmp_path / name)


def test_columns_may_be_called_anything(tmp_path: Path) -> None:
    (tmp_path / "msr.tsv").write_text("#1 String\t#2 String\nFirst.\tSecond.\n")
    assert texts(f"{tmp_path}/msr.tsv##2 String") == ["Second."]
    assert texts(f"{tmp_path}/*.tsv##1 String") == ["First."]
    (tmp_path / "c#.txt").write_text("sharp\n")
    assert texts(f"{tmp_path}/c#.txt") == ["sharp\n"]
    assert texts(f"{tmp_path}/c#.txt#lines") == ["sharp"]
    (tmp_path / "wide.jsonl").write_text(json.dumps({f"c{i}": i for i in range(1000)}))
    with pytest.raises(InputError, match="no column of text, only c0, c1") as refused:
        texts(tmp_path / "wide.jsonl")
    assert len(str(refused.value)) < 300


def test_rows_without_text_are_left_out_and_wrong_ones_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"text": "one"}\n{"text": null}\n{"other": 1}\n{"text": "  "}\n"bare"\n'
    )
    assert texts(tmp_path / "a.jsonl") == ["one", "bare"]
    for bad, sentence in {
        '{"text": 5}': "has no column of text",
        '{"text": "x"}\n{"text": 5}': "row 2: column 'text' holds int",
        "[1]": "line 1 is a JSON list",
        '{"text": "x"}\n{"text"': "line 2 is not JSON",
        '{"a": "x", "b": "y"}': "say which holds the text, as in .*#a",
    }.items():
        (tmp_path / "bad.jsonl").write_text(bad)
        with pytest.raises(InputError, match=sentence):
            texts(tmp_path / "bad.jsonl")


@pytest.mark.parametrize(
    "first",
    [['{"id": 0}'] * 150, ['{"id": 0, "text": null}'], ['{"id": "a"}'], ['{"id": "a", "text": null}', "{}"]],
    ids=["missing", "null", "another text", "another text and null"],
)
def test_the_first_row_alone_does_not_decide_on_the_column(tmp_path: Path, first: list[str]) -> None:
    rows = [json.dumps({"id": f"b{i}", "text": f"row {i}"}) for i in range(3)]
    (tmp_path / "a.jsonl").write_text("\n".join([*first, *rows]))
    for name in ("a.jsonl", "a.jsonl#text"):
        assert texts(tmp_path / name) == ["row 0", "row 1", "row 2"]
    with pytest.raises(InputError, match="unknown column of .* 'tekst': did you mean 'text'"):
        texts(tmp_path / "a.jsonl#tekst")


def test_a_column_of_no_usual_name_must_be_the_only_one_of_text(tmp_path: Path) -> None:
    rows = [json.dumps({"id": i, "prompt": f"row {i}"}) for i in range(tables.LOOKAHEAD_ROWS + 5)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    assert texts(tmp_path / "a.jsonl") == [f"row {i}" for i in range(tables.LOOKAHEAD_ROWS + 5)]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows[:9], '{"prompt": "a", "answer": "b"}']))
    with pytest.raises(InputError, match="has the columns prompt, answer: say which"):
        texts(tmp_path / "a.jsonl")


def test_wikitext_is_cut_at_its_titles_in_text_and_in_rows(tmp_path: Path) -> None:
    (tmp_path / "wiki.txt").write_text(WIKITEXT)
    first, second = texts(tmp_path / "wiki.txt")
    assert first.startswith(" = First = \n")
    assert "A section" in first
    assert second.endswith("Text of the second .\n")
    lines = WIKITEXT.splitlines(keepends=True)
    (tmp_path / "wiki.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    assert [text.strip() for text in texts(tmp_path / "wiki.jsonl") if text.strip()] == [
        first.strip(),
        second.strip(),
    ]


def test_marks_and_units(tmp_path: Path) -> None:
    (tmp_path / "marked.txt").write_text("a b\n\nc\n<|endoftext|>\nd<|endoftext|>\n\n<|endoftext|>")
    assert texts(tmp_path / "marked.txt") == ["a b\n\nc\n", "d"]
    (tmp_path / "plain.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\r\n\r\nc\n")
    assert texts(f"{tmp_path}/plain.txt#lines") == ["a", "b", "c"]
    assert texts(f"{tmp_path}/plain.txt#paragraphs") == ["a\nb", "c\n"]
    assert texts(f"{tmp_path}/plain.txt#file") == ["a\nb\n\nc\n"]
    with pytest.raises(InputError, match="did you mean 'lines'"):
        texts(f"{tmp_path}/plain.txt#line")


@pytest.mark.parametrize("whole", [False, True])
def test_marks_are_seen_behind_a_long_first_document(monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    monkeypatch.setattr(documents_module, "CHUNK", 1_000)
    monkeypatch.setattr(documents_module, "LONGEST", 4_000)

    def documents(text: str) -> list[str]:
        return list(
            documents_module.split_documents(
                io.StringIO(text).read, len(text), unit=None, single_document=whole
            )
        )

    others = [f"document {number}" for number in range(2_000)]
    first = "word " * 700
    assert documents(documents_module.END_OF_TEXT.join([first, *others])) == [first, *others]
    articles = [f" = Title = \n text of {number}" for number in range(3)]
    assert documents("\n".join([first, *articles])) == [first, *articles]
    pieces = documents(
        documents_module.END_OF_TEXT.join([first * 2, *others])
    )  # longer than any document may be
    assert "".join(pieces) == first * 2 + "".join(others)


@given(
    chunks=st.lists(st.text("ab \n", max_size=30), max_size=12),
    least=st.integers(0, 20),
    boundary=st.sampled_from(
        [
            None,
            documents_module.PARAGRAPH_BOUNDARY,
            documents_module.LINE_BOUNDARY,
            documents_module.END_OF_TEXT_BOUNDARY,
        ]
    ),
)
@example(chunks=["a" * 24 + "\n\n\na", ""], least=0, boundary=documents_module.PARAGRAPH_BOUNDARY)
@settings(max_examples=300, deadline=None)
def test_cutting_loses_nothing_but_boundaries_and_does_not_see_chunks(
    chunks: list[str], least: int, boundary: object
) -> None:
    pieces = list(documents_module.split_text(chunks, boundary, least, least + 25))  # type: ignore[arg-type]
    whole = "".join(chunks)
    assert pieces == list(documents_module.split_text([whole], boundary, least, least + 25))  # type: ignore[arg-type]
    assert max(map(len, pieces)) <= least + 25
    assert "".join("".join(pieces).split()) == "".join(whole.split())


def test_structureless_text_is_cut_into_pieces_fit_for_a_split(tmp_path: Path) -> None:
    for name, text in {
        "paragraphs": "word " * 50 + "\n\n",
        "lines": "a sentence of some words .\n",
        "endless": "word ",
        "unbroken": "x",
    }.items():
        path = tmp_path / f"{name}.txt"
        path.write_text(text * (400_000 // len(text)))
        pieces = texts(path)
        assert 80 <= len(pieces) <= 200, name
        assert len({part for part, _ in parts(path)}) == 1


def test_long_documents_are_cut_so_that_memory_stays_bounded(tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": "some words " * 500_000}) + "\n")
    pieces = texts(tmp_path / "long.jsonl")
    assert len(pieces) == 2
    assert "".join(pieces) == "some words " * 500_000


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", b"", "is empty"),
        ("a.txt", b"text\0more", "is binary, not"),
        ("a.txt", "naïve".encode("latin1"), r"not UTF-8 text \(byte 0xef\)"),
        ("a.jsonl", '{"text": "naïve"}'.encode("latin1"), r"not UTF-8 text \(byte 0xef\)"),
        ("a.jsonl", b'{"text": "x"}\n' + b"[" * 200_000, "line 2 is nested too deeply"),
        ("a.txt.gz", gzip.compress(b"text" * 1000, mtime=0)[:30], "cut short or damaged"),
        ("a.txt.gz", b"no gzip at all", "cannot be decompressed"),
        ("a.txt.bz2", b"no bzip at all", "cannot be decompressed"),
        ("a.parquet", b"PAR1 no, not really", "is not a Parquet file"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=sentence):
        texts(tmp_path / name)
