"""Rewrite the generated tables of the documentation: `make tables`.

A table is the Markdown output of the command in its marker `<!-- generated: qkflow COMMAND -->`, up to
`<!-- end -->`.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

from qkflow.cli.main import dispatch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TABLE = re.compile(r"(<!-- generated: qkflow (.+?) -->\n).*?(<!-- end -->)", re.S)


def render(text: str) -> str:
    """Return the page with every generated table rebuilt."""
    return TABLE.sub(lambda match: match[1] + run_command(match[2].split()) + match[3], text)


def run_command(arguments: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        dispatch([*arguments, "--markdown"])
    return printed.getvalue()


def main() -> None:
    for page in PAGES:
        text = page.read_text("utf-8")
        if (rendered := render(text)) != text:
            page.write_text(rendered, "utf-8")
            print(page.relative_to(ROOT), file=sys.stderr)


if __name__ == "__main__":
    main()
