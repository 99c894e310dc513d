"""Splitting text into documents: separators, WikiText titles, units, and size."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from input_errors import raises_code
from qkflow.data import corpora
from qkflow.data.readers import documents as reader
from qkflow.data.readers.files import ReadProgress
from qkflow.data.tokenizer import END_OF_TEXT

WIKITEXT = """
 = First = 

 Text of the first .

 = = A section = =

 More .

 = Second = 

 Text of the second .
""".replace("= =\n", "= = \n")


def read_documents(name: str | Path) -> list[tuple[str, str]]:
    return list(corpora.resolve(str(name)).iter_documents(ReadProgress()))


def read_texts(name: str | Path) -> list[str]:
    return [text for _, text in read_documents(name)]


def test_wikitext_is_split_at_titles_in_text_and_rows(tmp_path: Path) -> None:
    (tmp_path / "wiki.txt").write_text(WIKITEXT)
    first, second = read_texts(tmp_path / "wiki.txt")
    assert first.startswith(" = First = \n")
    assert "A section" in first
    assert second.endswith("Text of the second .\n")
    lines = WIKITEXT.splitlines(keepends=True)
    (tmp_path / "wiki.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    assert [text.strip() for text in read_texts(tmp_path / "wiki.jsonl") if text.strip()] == [
        first.strip(),
        second.strip(),
    ]


def test_end_of_text_separators_and_units(tmp_path: Path) -> None:
    (tmp_path / "marked.txt").write_text("a b\n\nc\n<|endoftext|>\nd<|endoftext|>\n\n<|endoftext|>")
    assert read_texts(tmp_path / "marked.txt") == ["a b\n\nc\n", "d"]
    (tmp_path / "plain.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\r\n\r\nc\n")
    assert read_texts(f"{tmp_path}/plain.txt#lines") == ["a", "b", "c"]
    assert read_texts(f"{tmp_path}/plain.txt#paragraphs") == ["a\nb", "c\n"]
    assert read_texts(f"{tmp_path}/plain.txt#file") == ["a\nb\n\nc\n"]
    with raises_code("unknown-unit"):
        read_texts(f"{tmp_path}/plain.txt#line")


@pytest.mark.parametrize("single_document", [False, True])
def test_separators_after_a_long_first_document(
    monkeypatch: pytest.MonkeyPatch, single_document: bool
) -> None:
    monkeypatch.setattr(reader, "CHUNK_CHARS", 1_000)
    monkeypatch.setattr(reader, "MAX_DOCUMENT_CHARS", 4_000)

    def documents(text: str) -> list[str]:
        return list(
            reader.split_documents(
                io.StringIO(text).read, len(text), unit=None, single_document=single_document
            )
        )

    others = [f"document {number}" for number in range(2_000)]
    first = "word " * 700
    assert documents(END_OF_TEXT.join([first, *others])) == [first, *others]
    articles = [f" = Title = \n text of {number}" for number in range(3)]
    assert documents("\n".join([first, *articles])) == [first, *articles]
    pieces = documents(END_OF_TEXT.join([first * 2, *others]))  # longer than MAX_DOCUMENT_CHARS
    assert "".join(pieces) == first * 2 + "".join(others)


@given(
    chunks=st.lists(st.text("ab \n", max_size=30), max_size=12),
    min_chars=st.integers(0, 20),
    boundary=st.sampled_from(
        [
            None,
            reader.PARAGRAPH_BOUNDARY,
            reader.LINE_BOUNDARY,
            reader.END_OF_TEXT_BOUNDARY,
        ]
    ),
)
@example(chunks=["a" * 24 + "\n\n\na", ""], min_chars=0, boundary=reader.PARAGRAPH_BOUNDARY)
@settings(max_examples=300, deadline=None)
def test_split_text_does_not_depend_on_chunks(
    chunks: list[str], min_chars: int, boundary: re.Pattern[str] | None
) -> None:
    pieces = list(reader.split_text(chunks, boundary, min_chars, min_chars + 25))
    whole = "".join(chunks)
    assert pieces == list(reader.split_text([whole], boundary, min_chars, min_chars + 25))
    assert max(map(len, pieces)) <= min_chars + 25
    assert "".join("".join(pieces).split()) == "".join(whole.split())


def test_text_without_structure_is_split_into_pieces(tmp_path: Path) -> None:
    for name, text in {
        "paragraphs": "word " * 50 + "\n\n",
        "lines": "a sentence of some words .\n",
        "endless": "word ",
        "unbroken": "x",
    }.items():
        path = tmp_path / f"{name}.txt"
        path.write_text(text * (400_000 // len(text)))
        pieces = read_texts(path)
        assert 80 <= len(pieces) <= 200, name
        assert len({split for split, _ in read_documents(path)}) == 1


def test_long_documents_are_split(tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": "some words " * 500_000}) + "\n")
    pieces = read_texts(tmp_path / "long.jsonl")
    assert len(pieces) == 2
    assert "".join(pieces) == "some words " * 500_000
