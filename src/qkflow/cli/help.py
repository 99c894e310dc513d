"""Format the options of a command for `--help`.

`(default: None)` is omitted, because the description of an option names its default. Positional arguments are
shown by name, lists with commas, as they are typed. A description is one line, which tyro wraps.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro


@cache  # annotations and docstring are changed in place, only once
def annotate_for_tyro(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return the command with annotations and a docstring for the help of tyro."""
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        display = tyro.conf.arg(
            metavar=_metavar(name, hints[name], parameter.default),
            help_behavior_hint=_default_hint(parameter.default),
        )
        command.__annotations__[name] = Annotated[hints[name], display]
    text, heading, options = (inspect.getdoc(command) or "").partition("Args:\n")
    command.__doc__ = text + heading + re.sub(r"\n {8,}", " ", options)
    return command


def _metavar(name: str, hint: Any, default: Any) -> str | None:
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if default is inspect.Parameter.empty:
        return name.upper()
    if tyro.conf.Positional in get_args(hint):
        return f"[{name.upper()}]"
    optional = get_origin(kind) in (Union, types.UnionType)
    inner = next(arg for arg in get_args(kind) if arg is not type(None)) if optional else kind
    if get_origin(inner) is Annotated:
        inner = get_args(inner)[0]
    if get_origin(inner) is tuple:
        return "KEY=VALUE" if name == "set" else "A,B,..."
    if not optional:
        return None
    if get_origin(inner) is Literal:
        return "{" + ",".join(map(str, get_args(inner))) + "}"
    return None if inner is bool else str(inner.__name__).upper()


def _default_hint(default: Any) -> str | Callable[[str], str] | None:
    if default in (None, (), "") or isinstance(default, bool):
        return ""
    if isinstance(default, tuple):
        return lambda label: f"(default: {label.replace(' ', ',')})"
    return None
