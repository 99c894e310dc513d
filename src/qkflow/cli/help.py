"""Format the options of a command for `--help`.

`(default: None)` is omitted, because the description of an option names its default. Positional arguments are
shown by name, lists with commas, as they are typed.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro


@cache  # annotations are changed in place, only once
def annotate_for_tyro(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return the command with annotations that tell tyro how to display its options."""
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        shown = tyro.conf.arg(
            metavar=_metavar(name, hints[name], parameter.default),
            help_behavior_hint=_default_hint(parameter.default),
        )
        command.__annotations__[name] = Annotated[hints[name], shown]
    return command


def _metavar(name: str, hint: Any, default: Any) -> str | None:
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if default is inspect.Parameter.empty:
        return name.upper()
    optional = get_origin(kind) in (Union, types.UnionType)
    inner = next(one for one in get_args(kind) if one is not type(None)) if optional else kind
    if get_origin(inner) is tuple:
        return "KEY=VALUE" if name == "set" else "A,B,..."
    if not optional:
        return None
    if get_origin(inner) is Literal:
        return "{" + ",".join(map(str, get_args(inner))) + "}"
    return None if inner is bool else str(inner.__name__).upper()


def _default_hint(default: Any) -> str | Callable[[str], str] | None:
    if default is None or default == () or isinstance(default, bool):
        return ""
    if isinstance(default, tuple):
        return lambda label: f"(default: {label.replace(' ', ',')})"
    return None
