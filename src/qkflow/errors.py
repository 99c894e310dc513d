"""The exception for bad user input."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any


class InputError(ValueError):
    """Bad user input. The message names what is wrong, the value, and what to do.

    `code` is a short stable identifier (kebab-case, e.g. `unknown-coupling`) that tests and programs match
    on; the message may be reworded at any time. The command line prints `qkflow: MESSAGE [CODE]` and exits
    with code 2. Any other exception is a bug and keeps its traceback.
    """

    def __init__(self, message: str, *, code: str = "invalid-input") -> None:
        super().__init__(message)
        self.code = code

    def to_line(self) -> str:
        """Return the line that commands and workers print: `qkflow: MESSAGE [CODE]`."""
        return f"qkflow: {printable(str(self))} [{self.code}]"

    @classmethod
    def from_line(cls, line: str) -> InputError:
        """Read back what `to_line` returned; any other text becomes the message."""
        match = re.fullmatch(r"qkflow: (?P<message>.*) \[(?P<code>[a-z0-9-]+)\]", line)
        return cls(match["message"], code=match["code"]) if match else cls(line)


def printable(text: str, limit: int = 2000) -> str:
    """Return text for one line of a terminal: escape line breaks, control characters and invalid UTF-8."""
    if len(text) > limit:
        text = f"{text[: limit // 2]} … {text[-limit // 2 :]}"
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode("ascii")
        for each in text
    )


def shorten(value: Any, limit: int = 60) -> str:
    """Return `repr(value)` for a message, shortened."""
    text = repr(value) if not isinstance(value, dict | list) else f"a {type(value).__name__}"
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def unknown(kind: str, name: object, known: Iterable[str], *, code: str | None = None) -> InputError:
    """Return the error for an unknown name, with the closest known name as a suggestion.

    The name is what a file has in its place, so it may be no text.

    The default code comes from the noun of `kind`: "option of coupling 'drift'" gives `unknown-option`.
    """
    options, text = sorted(known), printable(str(name), 200)
    near = difflib.get_close_matches(text, options, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'? " if near else ""
    noun = re.split(r" of | in | to |'", kind)[0].strip()
    slug = re.sub(r"[^a-z0-9]+", "-", noun.lower()).strip("-")
    return InputError(
        f"unknown {kind} '{text}': {hint}known: {', '.join(options)}", code=code or f"unknown-{slug}"
    )


def join_limited(names: Sequence[str], limit: int = 3) -> str:
    """Join names for a message: "a, b, c and 4 more"."""
    text = ", ".join(names[:limit])
    return text if len(names) <= limit else f"{text} and {len(names) - limit} more"
