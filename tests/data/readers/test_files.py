"""Files that cannot be read: the error names the file and its fault."""

from __future__ import annotations

import bz2
import gzip
import lzma
from pathlib import Path

import pytest

from input_errors import raises_code
from qkflow.data import corpora
from qkflow.data.readers.files import ReadProgress, detect_format


def test_detect_format_ignores_compression() -> None:
    names = ["a.txt", "a.JSONL.gz", "a.csv.xz", "a.parquet", "a.bin", "a.gz"]
    assert [detect_format(Path(name)) for name in names] == ["text", "jsonl", "csv", "parquet", None, None]


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("a.txt", b"", "empty-file"),
        ("a.txt", b"text\0more", "binary-file"),
        ("a.txt", "naïve".encode("latin1"), "not-utf8"),
        ("a.jsonl", '{"text": "naïve"}'.encode("latin1"), "not-utf8"),
        ("a.jsonl", b'{"text": "x"}\n' + b"[" * 200_000, "invalid-json"),
        ("a.txt.gz", gzip.compress(b"text" * 1000, mtime=0)[:30], "corrupt-compressed-file"),
        ("a.txt.gz", b"no gzip at all", "corrupt-compressed-file"),
        ("a.txt.bz2", b"no bzip at all", "corrupt-compressed-file"),
        ("a.parquet", b"PAR1 no, not really", "corrupt-parquet"),
    ],
)
def test_unreadable_files(tmp_path: Path, name: str, content: bytes, code: str) -> None:
    (tmp_path / name).write_bytes(content)
    with raises_code(code) as raised:
        list(corpora.resolve(str(tmp_path / name)).iter_documents(ReadProgress()))
    assert str(tmp_path / name) in str(raised.value)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("a.txt", ["one", "", "two", "lines"]),
        ("a.txt#paragraphs", ["one", "", "two", "lines"]),
        ("a.txt#lines", ["one", "two"]),
        ("a.jsonl", ['{"text": "one"}', "", '{"text": "two"}']),
        ("a.csv", ["id,text", '1,"one', 'more"', "2,two"]),
        ("a.tsv", ["id\ttext", "1\tone", "2\ttwo"]),
    ],
)
def test_windows_line_ends_give_the_same_documents(tmp_path: Path, name: str, lines: list[str]) -> None:
    """With and without the byte order mark that Windows programs write."""
    found = []
    for end, mark in (("\n", ""), ("\r\n", ""), ("\r\n", "\N{ZERO WIDTH NO-BREAK SPACE}")):
        (tmp_path / name.partition("#")[0]).write_bytes((mark + "".join(f"{x}{end}" for x in lines)).encode())
        corpus = corpora.resolve(str(tmp_path / name))
        found.append([text for _, text in corpus.iter_documents(ReadProgress())])
    assert found[0] == found[1] == found[2]
    assert "".join(found[0])


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("a.txt", "binary-file"),
        ("a.jsonl", "invalid-json"),
        ("a.parquet", "corrupt-parquet"),
        ("a.txt.gz", "corrupt-compressed-file"),
        ("a.jsonl.bz2", "corrupt-compressed-file"),
        ("a.csv.xz", "corrupt-compressed-file"),
    ],
)
def test_a_terabyte_of_zeros_is_refused_at_its_start(tmp_path: Path, name: str, code: str) -> None:
    with open(tmp_path / name, "wb") as file:
        file.truncate(1 << 40)  # sparse
    with raises_code(code):
        corpora.resolve(str(tmp_path / name)).content_fingerprint(ReadProgress())


def test_compressed_files_are_told_by_their_first_bytes(tmp_path: Path) -> None:
    for name, compress in (
        ("a.txt.gz", gzip.compress),
        ("b.txt.bz2", bz2.compress),
        ("c.txt.xz", lzma.compress),
    ):
        (tmp_path / name).write_bytes(compress(b"one\n\ntwo"))
        corpora.resolve(str(tmp_path / name)).content_fingerprint(ReadProgress())
