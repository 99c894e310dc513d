"""Registries of couplings and scorings: built-in ones by file, third-party ones by entry point.

A part is written `name` or `name:option=value:option=value`, e.g. `leapfrog:n=7:conservative=true`.
"""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from qkflow.errors import InputError, unknown

PartT = TypeVar("PartT")


MAX_OPTION = 1_000_000  # of a number: more steps or hidden units would never end or not fit any memory


@dataclass(frozen=True)
class Spec:
    """The name of a part and its options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str | Spec) -> Spec:
        if isinstance(text, Spec):
            return text
        if not isinstance(text, str):
            raise InputError(f"a part is a string such as 'leapfrog:n=7', not {text!r}", code="bad-spec")
        name, *pairs = text.split(":")
        options = {}
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not equals or not key or not value:
                raise InputError(
                    f"'{text}': write options as name:option=value, e.g. leapfrog:n=7", code="bad-spec"
                )
            options[key] = _parse_value(value)
        return cls(name, options)

    def __str__(self) -> str:
        pairs = [f"{key}={_format_value(value)}" for key, value in self.options.items()]
        return ":".join([self.name, *pairs])


def _parse_value(text: str) -> Any:
    """Parse true, false and numbers; return other text as it is."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _format_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_type(what: str, value: Any, default: Any) -> None:
    """Raise unless the value has the type of the default."""
    kinds = {"true or false": (bool,), "an integer": (int,), "a number": (int, float), "text": (str,)}
    for type_name, kind in kinds.items():
        if isinstance(default, kind):  # bool is a subclass of int, so it comes first
            if not isinstance(value, kind) or isinstance(value, bool) != isinstance(default, bool):
                raise InputError(f"{what} must be {type_name}, not '{value}'", code="bad-option-value")
            if isinstance(value, int | float) and MAX_OPTION < abs(value) < math.inf:
                raise InputError(
                    f"{what} must be at most {MAX_OPTION:,}, not {value}", code="bad-option-value"
                )
            return


class Registry(Generic[PartT]):
    """All parts of one kind. The modules of `package` are imported on first use and register themselves."""

    def __init__(self, kind: str, package: str, group: str) -> None:
        self.kind = kind
        self.package = package
        self.group = group
        self._parts: dict[str, type[PartT]] = {}

    def register(self, part: type[PartT]) -> type[PartT]:
        name = part.name  # type: ignore[attr-defined]
        if self._parts.get(name, part) is not part:
            raise InputError(f"two {self.kind}s are named '{name}': rename one", code="duplicate-name")
        self._parts[name] = part
        return part

    @cached_property
    def _loaded(self) -> dict[str, type[PartT]]:
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self.package}.{module.name}")
        for point in entry_points(group=self.group):
            self.register(point.load())
        return self._parts

    def names(self) -> list[str]:
        return sorted(self._loaded)

    def get(self, name: str) -> type[PartT]:
        if name not in self._loaded:
            raise unknown(self.kind, name, self.names())
        return self._loaded[name]

    def options(self, name: str) -> dict[str, inspect.Parameter]:
        """Return the keyword options of a part."""
        parameters = inspect.signature(self.get(name)).parameters
        return {key: value for key, value in parameters.items() if value.kind is value.KEYWORD_ONLY}

    def check(self, text: str | Spec) -> Spec:
        """Parse a spec; raise if the part or one of its options does not exist."""
        spec = Spec.parse(text)
        known = self.options(spec.name)
        aliases: dict[str, str] = getattr(self.get(spec.name), "aliases", {})
        options = {aliases.get(key, key): value for key, value in spec.options.items()}
        for key in options:
            if key not in known:
                if not known:
                    raise InputError(
                        f"{self.kind} '{spec.name}' takes no options, not '{key}'", code="unknown-option"
                    )
                raise unknown(f"option of {self.kind} '{spec.name}'", key, known)
            _check_type(f"{self.kind} '{spec.name}': {key}", options[key], known[key].default)
        return Spec(spec.name, options)

    def build(self, text: str | Spec, *arguments: Any) -> PartT:
        spec = self.check(text)
        return self.get(spec.name)(*arguments, **spec.options)
