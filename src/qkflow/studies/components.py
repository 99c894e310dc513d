"""The components of a variant, `leapfrog:n=7+differential`: which exist, their options, canonical text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from qkflow.attention import InitScheme, couplings, scorings
from qkflow.attention.init import INIT_MODIFIERS
from qkflow.attention.registry import Spec
from qkflow.errors import InputError, unknown
from qkflow.models.slow_path.config import SlowPathConfig
from qkflow.studies.grammar import duplicate_key
from qkflow.studies.overrides import config_keys, format_number

STANDARD = "standard"

_BUILTIN_COMPONENTS: dict[str, tuple[str, ...]] = {
    "standard": (STANDARD,),
    "init_modifier": tuple(INIT_MODIFIERS),
    "slow_path": ("slow", "dense-matched"),
    "pace": ("pace",),
}
_STRENGTH_NAMES = {"symmetric_score": "s", "scaled_identity": "s"}  # of other modifiers: c
_SLOW_OPTIONS = {item.name for item in fields(SlowPathConfig)} - {"attention"} | {"P"}
_PUBLISHED_NAMES = {"steps": "n", "ratio": "P"}  # results are published with these names of options

_VALUE = r"[A-Za-z0-9_.\-]+|\[[0-9,\s]*\]"
_NUMBER = re.compile(r"\d+(\.\d+)?(e[-+]?\d+)?")
_OPTION = re.compile(rf"(?P<key>[A-Za-z_][A-Za-z0-9_\-]*)(=(?P<value>{_VALUE}))?")


@dataclass(frozen=True)
class ComponentRegistry:
    """Names of all components by kind, and a function per kind that checks the options.

    The function may return the checked `Spec`, in which the options have their full names.
    """

    names: Mapping[str, Collection[str]]
    validators: Mapping[str, Callable[[str], Any]] = field(default_factory=dict)


def registered_components() -> ComponentRegistry:
    """Return the built-in components and those in the registries of couplings and scorings."""
    registries = {"coupling": couplings, "scoring": scorings}
    names: dict[str, Collection[str]] = {
        **_BUILTIN_COMPONENTS,
        **{kind: registry.names() for kind, registry in registries.items()},
    }
    return ComponentRegistry(names, {kind: registry.check for kind, registry in registries.items()})


@dataclass
class Component:
    """One component. An option without a value is a mode, such as `closed` of the slow path."""

    kind: str
    name: str
    options: list[tuple[str, str | None]] = field(default_factory=list)

    def takes(self, key: str, registry: ComponentRegistry) -> bool:
        """Return whether `key` is an option of this component."""
        if self.kind in ("standard", "pace"):
            return False
        if self.kind == "init_modifier":
            return key in ("c", self.strength_name)
        if self.kind == "slow_path":
            return key in _SLOW_OPTIONS
        try:
            registry.validators.get(self.kind, str)(f"{self.name}:{key}=0")
        except InputError as error:
            return error.code != "unknown-option"
        return True

    @property
    def strength_name(self) -> str:
        return _STRENGTH_NAMES.get(self.name, "c")

    def canonical_text(self, variant: str, registry: ComponentRegistry) -> str:
        """Return the text of the component within the canonical name; of `pace`, its number."""
        if self.kind == "pace":
            return self._pace(variant)
        if self.kind == "init_modifier":
            return self._init_modifier(variant)
        if self.kind == "standard" and self.options:
            raise InputError(f"variant '{variant}': standard takes no options", code="unknown-option")
        pairs = [(key, None if value is None else _canonical_value(value)) for key, value in self.options]
        as_written = ":".join([self.name, *(key if v is None else f"{key}={v}" for key, v in pairs)])
        checked = registry.validators[self.kind](as_written) if self.kind in registry.validators else None
        names = list(checked.options) if isinstance(checked, Spec) else list(dict(pairs))
        if len(names) < len(pairs):  # the same option twice, perhaps once as an alias
            raise duplicate_key(variant, pairs[-1][0])
        pairs = [(_PUBLISHED_NAMES.get(n, n), value) for n, (_, value) in zip(names, pairs, strict=True)]
        if len(dict(pairs)) < len(pairs):
            raise duplicate_key(variant, pairs[-1][0])
        published = set(_PUBLISHED_NAMES.values())
        pairs.sort(key=lambda pair: (pair[1] is not None, pair[0] not in published, pair[0]))
        return ":".join([self.name, *(key if value is None else f"{key}={value}" for key, value in pairs)])

    def _pace(self, variant: str) -> str:
        pace = canonical_positive(dict(self.options).get("pace"))
        if pace is None or len(self.options) != 1:
            raise InputError(
                f"variant '{variant}': pace needs one number above zero, e.g. standard+pace=4",
                code="invalid-pace",
            )
        return pace

    def _init_modifier(self, variant: str) -> str:
        name, letter = self.name, self.strength_name
        if len(self.options) > 1:
            raise duplicate_key(variant, letter)
        try:
            default = InitScheme.parse(f"gpt2+{name}")
            if any(key not in ("c", letter) or value is None for key, value in self.options):
                raise InputError(f"write {name}:{letter}=NUMBER", code="unknown-option")
            scheme = InitScheme.parse(f"gpt2+{name}={self.options[0][1]}") if self.options else default
        except InputError as error:
            raise InputError(f"variant '{variant}': {error}", code=error.code) from None
        return name if scheme == default else f"{name}:{letter}={str(scheme).partition('=')[2]}"


def parse_components(text: str, variant: str, registry: ComponentRegistry) -> dict[str, Component]:
    """Parse `leapfrog:n=7+differential`, a part of the text of `variant`, into components by kind."""
    kinds = {name: kind for kind, group in registry.names.items() for name in group}
    by_kind: dict[str, Component] = {}
    for part in text.split("+"):
        component = _parse_component(part.strip(), variant, kinds)
        if component.kind in by_kind:
            names = f"{by_kind[component.kind].name}, {component.name}"
            raise InputError(
                f"variant '{variant}' has two components of the kind {component.kind} ({names}): use one",
                code="duplicate-component",
            )
        by_kind[component.kind] = component
    return by_kind


def _parse_component(text: str, variant: str, kinds: Mapping[str, str]) -> Component:
    head, *options = text.split(":")
    match = _OPTION.fullmatch(head)
    if match is None:
        raise InputError(
            f"variant '{variant}': '{text}' is not a component: use e.g. leapfrog:n=7", code="variant-syntax"
        )
    name, value = match["key"], match["value"]
    if name not in kinds:
        raise unknown("variant", name, kinds)
    component = Component(kinds[name], name)
    if component.kind == "pace":
        component.options = [("pace", value), *((option, None) for option in options)]
        return component
    if value is not None:
        raise InputError(
            f"variant '{variant}': options follow a colon, e.g. {name}:n={value}",
            code="variant-option-syntax",
        )
    component.options = [parse_option(option, name, variant) for option in options]
    return component


def parse_option(text: str, component: str, variant: str) -> tuple[str, str | None]:
    match = _OPTION.fullmatch(text)
    if match is None:
        raise InputError(
            f"variant '{variant}': '{text}' is not an option: use e.g. {component}:n=7",
            code="variant-option-syntax",
        )
    return match["key"], match["value"]


def add_option(
    components: Mapping[str, Component], key: str, value: str, variant: str, registry: ComponentRegistry
) -> None:
    """Add an option to the component that takes it."""
    with_options = [c for c in components.values() if c.kind not in ("standard", "pace")]
    takers = [component for component in with_options if component.takes(key, registry)]
    if len(takers) > 1:
        names = " and ".join(component.name for component in takers)
        raise InputError(
            f"variant '{variant}': {names} both take {key}: write it after one, e.g. "
            f"{takers[0].name}:{key}={value}",
            code="ambiguous-option",
        )
    config_key = next((name for name in config_keys() if name.endswith(f".{key}")), None)
    if not takers and config_key:
        raise InputError(
            f"variant '{variant}': {key} is not an option of its components: did you mean {config_key}?",
            code="unknown-option",
        )
    if not takers and len(with_options) != 1:
        raise unknown(f"option of variant '{variant}'", key, config_keys())
    taker = takers[0] if takers else with_options[0]  # whose own error has the closest option
    text = f"{key}={value.lower().replace('e+', 'e') if _is_number(value) else value}"
    taker.options.append(parse_option(text, taker.name, variant))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _canonical_value(text: str) -> str:
    """Return the canonical text of an option's value: 0.003 for 3e-3, true for True."""
    value = Spec.parse(f"name:option={text}").options["option"]
    if isinstance(value, bool):
        return str(value).lower()
    return format_number(value) if isinstance(value, int | float) else re.sub(r"\s", "", text)


def canonical_positive(text: str | None) -> str | None:
    """Return the canonical text of a number above zero (4, not 4.0), or None for any other text."""
    if text is None or not _NUMBER.fullmatch(text) or not 0 < float(text) < math.inf:
        return None
    return format_number(float(text))
