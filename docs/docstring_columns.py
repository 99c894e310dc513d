"""Show the two-column lists of our docstrings as tables in the API reference (an extension of griffe).

dim                  size of the residual stream
n_heads, n_kv_heads  query heads, and key/value heads
                     shared by groups of them
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

import griffe

ROW = re.compile(r"(?P<name>\S(?:.*?[^\s.])?) {2,}(?P<text>\S.*)")


class DocstringColumns(griffe.Extension):
    """Rewrite every docstring as it is loaded."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = columns_to_tables(obj.docstring.value)


def columns_to_tables(text: str) -> str:
    """Return the docstring with every paragraph of two columns as a Markdown table."""
    paragraphs = [
        list(lines) for blank, lines in groupby(text.splitlines(), lambda line: not line) if not blank
    ]
    return "\n\n".join("\n".join(_to_table(lines) or lines) for lines in paragraphs)


def _to_table(lines: list[str]) -> list[str] | None:
    """Return the table, or None if a line has no second column and does not continue one."""
    rows: list[list[str]] = []
    column = 0
    for line in lines:
        match = ROW.fullmatch(line)
        if rows and line[:column].isspace():
            rows[-1][1] += " " + line.strip()
        elif match and not line[0].isspace():
            column = match.start("text")
            rows.append([match["name"], match["text"]])
        else:
            return None
    cells = [[f"`{name}`", text.replace("|", r"\|")] for name, text in rows]
    return ["| name | description |", "|---|---|", *(f"| {name} | {text} |" for name, text in cells)]
