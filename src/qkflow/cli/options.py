"""Command-line options derived from dataclasses, so that each option is described in one place."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Collection
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from qkflow.cli.commands.registry import field_descriptions
from qkflow.config_io import range_of

Command = Callable[..., int]


def options_from(
    *config_types: type,
    as_text: Collection[str] = (),
    only: Collection[str] | None = None,
    unset: Collection[str] = (),
) -> Callable[[Command], Command]:
    """Add one option per dataclass field to a command; its first argument is the dict of their values.

    Names, defaults and help texts come from the dataclasses. A field without a default is positional. `only`
    selects fields; fields in `unset` default to None, and are left out of the dict unless the user sets them.
    Choices, lists and the fields in `as_text` (counts such as 200k) are passed on as text: the config parses
    them, with an InputError that is one sentence.
    """

    def decorate(command: Command) -> Command:
        other = list(inspect.signature(command).parameters.values())[1:]
        hints = get_type_hints(command, include_extras=True)
        derived, descriptions = [], []
        for cls in config_types:
            field_types, texts = get_type_hints(cls), field_descriptions(cls)
            annotated = get_type_hints(cls, include_extras=True)
            for field in dataclasses.fields(cls):
                if only is not None and field.name not in only:
                    continue
                default = None if field.name in unset else _default(field)
                hints[field.name] = _option_type(field_types[field.name], default)
                if hints[field.name] is str and isinstance(default, int):  # a number or a word, as in --seeds
                    default = str(default)
                if field.name in as_text:
                    hints[field.name] = str | None
                if bounds := range_of(annotated[field.name]):
                    hints[field.name] = Annotated[hints[field.name], bounds]
                if default is inspect.Parameter.empty:
                    hints[field.name] = Annotated[hints[field.name], tyro.conf.Positional]
                derived.append(inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default))
                descriptions.append(f"    {field.name}: {texts[field.name]}")
        names = [parameter.name for parameter in derived]

        @functools.wraps(command)
        def wrapper(**options: Any) -> int:
            settings = {name: options.pop(name) for name in names}
            settings = {k: v for k, v in settings.items() if k not in unset or v is not None}
            return command(settings, **options)

        parameters = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[parameter.name])
            for parameter in (*derived, *other)
        ]
        del wrapper.__wrapped__  # it has another signature
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        wrapper.__doc__ = "\n".join([inspect.getdoc(command) or "", *descriptions])
        return wrapper

    return decorate


def _default(field: dataclasses.Field[Any]) -> Any:
    """Return the default as it is written on the command line."""
    if field.default is dataclasses.MISSING:
        return inspect.Parameter.empty
    if isinstance(field.default, tuple):
        return tuple(f"{item:g}" if isinstance(item, float) else item for item in field.default)
    return field.default


def _option_type(hint: Any, default: Any) -> Any:
    """Return the type that tyro parses: text for choices and lists, else the type of the field."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kind = next(kind for kind in kinds if kind is not type(None))
    if get_origin(kind) is tuple:
        kind = tuple[str, ...]
    if any(get_origin(each) is Literal for each in kinds):
        kind = str
    return kind | None if default is None else kind
