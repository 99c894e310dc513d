"""Check the parsed arguments of a command before it runs: the only way an argument enters the program.

A number must lie in the range of its annotation (`Annotated[int, Range(1, 100)]`), a path must not name a
device, a pipe or a socket, and must not be empty.
"""

from __future__ import annotations

import functools
import inspect
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from qkflow.config_io import Range, range_of
from qkflow.errors import InputError
from qkflow.plain_data import describe_mode

# Of options that declare no range of their own: beyond any count that a computer can work through.
DEFAULT_RANGE = Range(-(10**9), 10**9, cost="no machine can work through as many")
DEFAULT_FLOAT_RANGE = Range(-1e30, 1e30)


def checked(command: Callable[..., Any], argv: Sequence[str]) -> Callable[..., Any]:
    """Return the command, which then checks its arguments first. `argv` are the words they were read from."""
    hints = get_type_hints(command, include_extras=True)

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(command).bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            for item in value if isinstance(value, tuple) else (value,):
                _check_value(f"--{name.replace('_', '-')}", item, hints[name], argv)
        return command(*args, **kwargs)

    return wrapper


def _check_value(name: str, value: Any, hint: Any, argv: Sequence[str]) -> None:
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int | float):
        default = DEFAULT_RANGE if isinstance(value, int) else DEFAULT_FLOAT_RANGE
        (range_of(hint) or default).check(name, value)
    elif isinstance(value, Path):
        check_path(name, value, is_empty=value == Path() and "." not in argv)


def check_path(name: str, path: Path, is_empty: bool = False) -> None:
    """Raise InputError for a path that no command can read from or write to."""
    if is_empty:
        raise InputError(f"{name.lstrip('-')} is an empty name: write a path", code="empty-path")
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return  # the command tells what it expected
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path} is not a path that can be used ({reason})", code="unusable-path") from None
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise InputError(f"{path} is {describe_mode(mode)}: name a file or a folder", code="not-a-file")
