"""The one exception users see: bad input, said in one clear sentence."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Something the user gave is wrong; the message says what, where, and what to do.

    The command line prints the message alone and exits with code 2. Anything else that
    escapes is a bug of ours and keeps its traceback.
    """


def unknown(kind: str, name: str, known: Iterable[str]) -> InputError:
    """The error for a name nobody knows, with the nearest known one suggested."""
    options = sorted(known)
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return InputError(f"unknown {kind} '{name}': {hint}known: {', '.join(options)}")
