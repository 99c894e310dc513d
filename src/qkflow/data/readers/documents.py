"""Cutting running text into documents, streaming: by marks, headings, lines, blank lines, or size."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice

CHUNK = 1 << 20  # characters read at a time
LONGEST = 1 << 22  # characters; a longer document is cut, so that memory stays bounded
MARK = "<|endoftext|>"
UNITS = ("file", "lines", "paragraphs")  # what `#unit` may ask of a plain text

TITLE = re.compile(r" = [^=\n](?:[^\n]*[^=\n])? = \n")  # the line that begins an article of WikiText
BEFORE_TITLE = re.compile(rf"\n(?={TITLE.pattern})")
# Blank lines up to one that is not. No part of it can be matched in two ways, so that neither where a chunk
# ends nor a megabyte of newlines makes a difference.
BLANK = re.compile(r"(?<!\s)[^\S\n]*+\n(?:[^\S\n]*+\n)++(?=[^\S\n]*+\S)")
LINE = re.compile(r"\n")
MARKED = re.compile(re.escape(MARK) + r"\n?")

Read = Callable[[int], str]  # a text stream's `read`


def documents(read: Read, size: int, *, unit: str | None, whole: bool) -> Iterator[str]:
    """Documents of a plain text of about `size` bytes, in order.

    `unit` forces one document a file, line or paragraph. Otherwise the text's own marks decide, if it has
    any: `<|endoftext|>` or WikiText's titles. Without marks the text is one document if `whole`, or
    else is cut at blank lines (at line ends or words where there are none) into pieces.
    """
    head = read(LONGEST)  # a first document without a mark up to here is cut anyway
    parts = chain([head], iter(lambda: read(CHUNK), ""))
    if unit == "lines":
        return cut(parts, LINE)
    if unit == "paragraphs":
        return cut(parts, BLANK)
    if unit is None and MARK in head:
        return cut(parts, MARKED)
    if unit is None and BEFORE_TITLE.search("\n" + head):
        return cut(parts, BEFORE_TITLE)
    if unit == "file":
        return cut(parts, None)
    if whole:
        return cut(parts, MARKED)
    # About two hundred pieces from a small file, 16,000 characters each from a large one: enough pieces
    # for a fair split by hash, each long enough to give context.
    least = min(max(size // 200, 1_000), 16_000)
    pieces = cut(parts, BLANK, least, 2 * least)
    return chain.from_iterable(map(MARKED.split, pieces))  # marks that come late are no text either


def cut(
    chunks: Iterable[str], boundary: re.Pattern[str] | None, least: int = 0, most: int = LONGEST
) -> Iterator[str]:
    """Pieces that end at the first `boundary` after `least` characters, and nowhere later than `most`."""
    text, at = "", 0
    for chunk in chunks:
        seen = max(at - 1, 0)  # a boundary may look back one character
        text, at = text[seen:] + chunk, at - seen
        while True:
            found = boundary.search(text, at + least, at + most) if boundary else None
            if found and found.end() < len(text):  # one that touches the end may go on in the next chunk
                yield text[at : found.start()]
                at = found.end()
            elif len(text) - at > most:
                end = _last_break(text, at, at + most)
                yield text[at:end]
                at = end
            else:
                break
    last = boundary.search(text, at + least) if boundary else None
    yield text[at : last.start()] if last else text[at:]


def _last_break(text: str, start: int, end: int) -> int:
    """Where to cut when no boundary comes: after the last line or before the last word that fits."""
    middle = (start + end) // 2
    line = text.rfind("\n", middle, end)
    if line >= 0:
        return line + 1
    word = text.rfind(" ", middle, end)
    return word if word >= 0 else end


def articles(rows: Iterator[str]) -> Iterator[str]:
    """Rows as they are; where they are the lines of WikiText articles, joined back into articles."""
    head = list(islice(rows, 200))
    rows = chain(head, rows)
    return _joined(rows) if any(map(_is_title, head)) else rows


def _is_title(row: str) -> bool:
    return TITLE.fullmatch(row.rstrip("\n") + "\n") is not None


def _joined(rows: Iterable[str]) -> Iterator[str]:
    lines: list[str] = []
    for row in rows:
        if lines and _is_title(row):
            yield "".join(lines)
            lines.clear()
        lines.append(row if row.endswith("\n") else row + "\n")
    yield "".join(lines)
