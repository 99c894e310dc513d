"""Standard streams on any terminal: closed ones, and encodings without Greek letters and box drawing.

Imports nothing heavy: commands and workers call `configure_streams` first.
"""

from __future__ import annotations

import codecs
import os
import sys
import unicodedata

ERROR_HANDLER = "qkflow-ascii"
_REPLACEMENTS = {
    "→": "->", "←": "<-", "↔": "<->", "⇒": "=>", "↑": "^", "↓": "v",
    "≤": "<=", "≥": ">=", "≠": "!=", "≈": "~", "±": "+/-", "×": "x", "·": "*", "⊙": "*", "∘": "o", "−": "-",
    "∇": "grad", "∂": "d", "√": "sqrt", "∞": "inf", "∈": "in", "‖": "||", "⟨": "<", "⟩": ">", "ᵀ": "^T",
    "½": "1/2", "≪": "<<", "∫": "int",
    "–": "-", "—": "-", "•": "*", "‘": "'", "’": "'", "“": '"', "”": '"', "✓": "yes", "✗": "no",
}  # fmt: skip


def configure_streams() -> None:
    """Make every write to stdout and stderr succeed, whatever the characters and the encoding.

    A closed stream becomes the null device: otherwise the next file that is opened would take its number and
    receive the output.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            _open_null_device(number, name)
        elif name != "stdin" and hasattr(getattr(sys, name), "reconfigure"):
            getattr(sys, name).reconfigure(errors=ERROR_HANDLER)


def discard_unwritable() -> None:
    """Redirect a stream that cannot be written (closed pipe, full disk) to the null device before exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


def _open_null_device(number: int, name: str) -> None:
    descriptor = os.open(os.devnull, os.O_RDWR)
    if descriptor != number:
        os.dup2(descriptor, number)
        os.close(descriptor)
    mode = "r" if name == "stdin" else "w"
    setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - until exit


def to_ascii(character: str) -> str:
    """Return what to print for a character that the encoding of a stream lacks: α becomes alpha, → ->."""
    if character in _REPLACEMENTS:
        return _REPLACEMENTS[character]
    name = unicodedata.name(character, "")
    if name.startswith("GREEK ") and " LETTER " in name:
        letter = name.partition(" LETTER ")[2].partition(" ")[0]
        return letter.lower() if "SMALL" in name else letter.capitalize()
    if name.startswith("BOX DRAWINGS "):
        return "|" if name.endswith(" VERTICAL") else "-" if name.endswith(" HORIZONTAL") else "+"
    if "\u2580" <= character <= "\u259f":  # block elements
        return "#"
    if "\udc80" <= character <= "\udcff":  # a byte of a file name that is not UTF-8
        return f"\\x{ord(character) - 0xDC00:02x}"
    plain = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode() or "?"
    return f"^{plain}" if name.startswith("SUPERSCRIPT ") else plain


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(to_ascii, error.object[error.start : error.end])), error.end


codecs.register_error(ERROR_HANDLER, _replace)
