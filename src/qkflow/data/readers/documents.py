"""Split streamed text into documents: at separators, headings, lines, blank lines, or by size."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice

from qkflow.data.tokenizer import END_OF_TEXT

CHUNK_CHARS = 1 << 20  # characters per read
MAX_DOCUMENT_CHARS = 1 << 22  # longer documents are split, which bounds memory
UNITS = ("file", "lines", "paragraphs")  # allowed values of `#unit` after the path of a plain text

WIKITEXT_TITLE = re.compile(r" = [^=\n](?:[^\n]*[^=\n])? = \n")  # first line of a WikiText article
ARTICLE_BOUNDARY = re.compile(rf"\n(?={WIKITEXT_TITLE.pattern})")
# One or more blank lines. The possessive quantifiers make every match unique: the result does not depend on
# chunk ends, and a megabyte of newlines takes linear time.
PARAGRAPH_BOUNDARY = re.compile(r"(?<!\s)[^\S\n]*+\n(?:[^\S\n]*+\n)++(?=[^\S\n]*+\S)")
LINE_BOUNDARY = re.compile(r"\n")
END_OF_TEXT_BOUNDARY = re.compile(re.escape(END_OF_TEXT) + r"\n?")

ReadFn = Callable[[int], str]  # `read` of a text stream


def split_documents(read: ReadFn, n_bytes: int, *, unit: str | None, single_document: bool) -> Iterator[str]:
    """Return the documents of a plain text of about `n_bytes` bytes, in order.

    `unit` forces one document per file, line or paragraph. Otherwise the text is split at `<|endoftext|>` or
    at WikiText titles, if it has any. A text without them is one document if `single_document`; else it is
    split at blank lines (at line ends or spaces if there are none).
    """
    head = read(MAX_DOCUMENT_CHARS)  # a first document longer than this is split in any case
    chunks = chain([head], iter(lambda: read(CHUNK_CHARS), ""))
    if unit == "lines":
        return split_text(chunks, LINE_BOUNDARY)
    if unit == "paragraphs":
        return split_text(chunks, PARAGRAPH_BOUNDARY)
    if unit is None and END_OF_TEXT in head:
        return split_text(chunks, END_OF_TEXT_BOUNDARY)
    if unit is None and ARTICLE_BOUNDARY.search("\n" + head):
        return split_text(chunks, ARTICLE_BOUNDARY)
    if unit == "file":
        return split_text(chunks, None)
    if single_document:
        return split_text(chunks, END_OF_TEXT_BOUNDARY)
    # About 200 pieces from a small file, 16,000 characters each from a large one: enough pieces for a split
    # by hash, each long enough to be context.
    min_chars = min(max(n_bytes // 200, 1_000), 16_000)
    pieces = split_text(chunks, PARAGRAPH_BOUNDARY, min_chars, 2 * min_chars)
    # The first separator may come after `head`.
    return chain.from_iterable(map(END_OF_TEXT_BOUNDARY.split, pieces))


def split_text(
    chunks: Iterable[str],
    boundary: re.Pattern[str] | None,
    min_chars: int = 0,
    max_chars: int = MAX_DOCUMENT_CHARS,
) -> Iterator[str]:
    """Return pieces that end at the first `boundary` after `min_chars`, and at `max_chars` at the latest."""
    text, start = "", 0
    for chunk in chunks:
        keep = max(start - 1, 0)  # a boundary may look back one character
        text, start = text[keep:] + chunk, start - keep
        while True:
            match = boundary.search(text, start + min_chars, start + max_chars) if boundary else None
            if match and match.end() < len(text):  # a match at the end may continue in the next chunk
                yield text[start : match.start()]
                start = match.end()
            elif len(text) - start > max_chars:
                end = _last_break(text, start, start + max_chars)
                yield text[start:end]
                start = end
            else:
                break
    last = boundary.search(text, start + min_chars) if boundary else None
    yield text[start : last.start()] if last else text[start:]


def _last_break(text: str, start: int, end: int) -> int:
    """Return where to split without a boundary: after the last line or before the last word that fits."""
    middle = (start + end) // 2
    line = text.rfind("\n", middle, end)
    if line >= 0:
        return line + 1
    word = text.rfind(" ", middle, end)
    return word if word >= 0 else end


def join_wikitext_articles(rows: Iterator[str]) -> Iterator[str]:
    """Join rows that are the lines of WikiText articles into articles; return other rows unchanged."""
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
