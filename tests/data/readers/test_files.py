"""Files that cannot be read: the error names the file and its fault."""

from __future__ import annotations

import gzip
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
