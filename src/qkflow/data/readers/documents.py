"""Cutting running text into documents, streaming: by marks, headings, lines, blank lines, or size."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice

CHUNK_CHARS = 1 << 20  # characters read at a time
MAX_DOCUMENT_CHARS = 1 << 22  # characters; a longer document is cut, so that memory stays bounded
END_OF_TEXT = "<|endoftext|>"
UNITS = ("file", "lines", "paragraphs")  # what `#unit` may ask of a plain text

WIKITEXT_TITLE = re.compile(r" = [^=\n](?:[^\n]*[^=\n])? = \n")  # the line that begins an article of WikiText
ARTICLE_BOUNDARY = re.compile(rf"\n(?={WIKITEXT_TITLE.pattern})")
# Blank lines up to one that is not. No part of it can be matched in two ways, so that neither where a chunk
# ends nor a megabyte of newlines makes a difference.
PARAGRAPH_BOUNDARY = re.compile(r"(?<!\s)[^\S\n]*+\n(?:[^\S\n]*+\n)++(?=[^\S\n]*+\S)")
LINE_BOUNDARY = re.compile(r"\n")
END_OF_TEXT_BOUNDARY = re.compile(re.escape(END_OF_TEXT) + r"\n?")

ReadFn = Callable[[int], str]  # a text stream's `read`


def split_documents(read: ReadFn, n_bytes: int, *, unit: str | None, single_document: bool) -> Iterator[str]:
    """Documents of a plain text of about `size` bytes, in order.

    `unit` forces one document a file, line or paragraph. Otherwise the text's own marks decide, if it has
    any: `<|endoftext|>` or WikiText's titles. Without marks the text is one document if `whole`, or
    else is cut at blank lines (at line ends or words where there are none) into pieces.
    """
    head = read(MAX_DOCUMENT_CHARS)  # a first document without a mark up to here is cut anyway
    parts = chain([head], iter(lambda: read(CHUNK_CHARS), ""))
    if unit == "lines":
        return split_text(parts, LINE_BOUNDARY)
    if unit == "paragraphs":
        return split_text(parts, PARAGRAPH_BOUNDARY)
    if unit is None and END_OF_TEXT in head:
        return split_text(parts, END_OF_TEXT_BOUNDARY)
    if unit is None and ARTICLE_BOUNDARY.search("\n" + head):
        return split_text(parts, ARTICLE_BOUNDARY)
    if unit == "file":
        return split_text(parts, None)
    if single_document:
        return split_text(parts, END_OF_TEXT_BOUNDARY)
    # About two hundred pieces from a small file, 16,000 characters each from a large one: enough pieces
    # for a fair split by hash, each long enough to give context.
    least = min(max(n_bytes // 200, 1_000), 16_000)
    pieces = split_text(parts, PARAGRAPH_BOUNDARY, least, 2 * least)
    return chain.from_iterable(
        map(END_OF_TEXT_BOUNDARY.split, pieces)
    )  # marks that come late are no text either


def split_text(
    chunks: Iterable[str],
    boundary: re.Pattern[str] | None,
    min_chars: int = 0,
    max_chars: int = MAX_DOCUMENT_CHARS,
) -> Iterator[str]:
    """Pieces that end at the first `boundary` after `least` characters, and nowhere later than `most`."""
    text, at = "", 0
    for chunk in chunks:
        seen = max(at - 1, 0)  # a boundary may look back one character
        text, at = text[seen:] + chunk, at - seen
        while True:
            found = boundary.search(text, at + min_chars, at + max_chars) if boundary else None
            if found and found.end() < len(text):  # one that touches the end may go on in the next chunk
                yield text[at : found.start()]
                at = found.end()
            elif len(text) - at > max_chars:
                end = _last_break(text, at, at + max_chars)
                yield text[at:end]
                at = end
            else:
                break
    last = boundary.search(text, at + min_chars) if boundary else None
    yield text[at : last.start()] if last else text[at:]


def _last_break(text: str, start: int, end: int) -> int:
    """Where to cut when no boundary comes: after the last line or before the last word that fits."""
    middle = (start + end) // 2
    line = text.rfind("\n", middle, end)
    if line >= 0:
        return line + 1
    word = text.rfind(" ", middle, end)
    return word if word >= 0 else end


def join_wikitext_articles(rows: Iterator[str]) -> Iterator[str]:
    """Rows as they are; where they are the lines of WikiText articles, joined back into articles."""
    head = list(islice(rows, 200))
    rows = chain(head, rows)
    return _join_articles(rows) if any(map(_is_title, head)) else rows


def _is_title(row: str) -> bool:
    return WIKITEXT_TITLE.fullmatch(row.rstrip("\n") + "\n") is not None


def _join_articles(rows: Iterable[str]) -> Iterator[str]:
    lines: list[str] = []
    for row in rows:
        if lines and _is_title(row):
            yield "".join(lines)
            lines.clear()
        lines.append(row if row.endswith("\n") else row + "\n")
    yield "".join(lines)
