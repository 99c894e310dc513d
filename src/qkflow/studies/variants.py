"""Names of variants: `leapfrog:n=7+differential@fan_in`.

A variant is a sum of components, at most one of each kind, optionally with a fixed init:

    standard                          softmax attention, nothing added
    euler   leapfrog:n=7              a coupling, with options
    affine+differential               a coupling and a scoring, in either order
    symmetric   symmetric:c=3         standard attention with W_Q initialized to W_Q + c·W_K
    slow:closed   dense-matched       a slow path, or its control with equal compute
    standard+pace=4                   the query-key circuit learns 4 times faster
    euler@fan_in   standard@fan_in+symmetric=1     one fixed init, instead of all in --inits

The registry of a component checks its options. This module only lists which components exist.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from qkflow.attention import InitScheme, couplings, scorings
from qkflow.errors import InputError, unknown

STANDARD = "standard"
NO_COUPLING = "none"
SOFTMAX = "softmax"
DEFAULT_SYMMETRIC_C = "1"

_BUILTIN_COMPONENTS: dict[str, tuple[str, ...]] = {
    "standard": (STANDARD,),
    "symmetric": ("symmetric",),
    "slow_path": ("slow", "dense-matched"),
    "pace": ("pace",),
}

_VALUE = r"[A-Za-z0-9_.\-]+"
_NUMBER = r"\d+(\.\d+)?(e-?\d+)?"
_OPTION = re.compile(rf"[A-Za-z_][A-Za-z0-9_\-]*(={_VALUE})?")
_COMPONENT = re.compile(rf"(?P<name>[A-Za-z_][A-Za-z0-9_\-]*)(=(?P<value>{_VALUE}))?")


@dataclass(frozen=True)
class ComponentRegistry:
    """Names of all components by kind, and a function per kind that checks the options."""

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


@dataclass(frozen=True)
class Variant:
    """A combination of components, with a fixed init if `init` is set."""

    coupling: str = NO_COUPLING
    scoring: str = SOFTMAX
    slow_path: str | None = None
    pace: str | None = None
    symmetric: str | None = None  # c of the symmetric init, added to every init it runs with
    init: InitScheme | None = None

    @property
    def name(self) -> str:
        """The canonical name: equal variants have equal names."""
        parts = [self.coupling] if self.coupling != NO_COUPLING else []
        parts += [self.scoring] if self.scoring != SOFTMAX else []
        parts += [self.slow_path] if self.slow_path else []
        if self.symmetric:
            parts.append(
                "symmetric" if self.symmetric == DEFAULT_SYMMETRIC_C else f"symmetric:c={self.symmetric}"
            )
        if self.pace:
            parts += [f"pace={self.pace}"] if parts else [STANDARD, f"pace={self.pace}"]
        name = "+".join(parts) or STANDARD
        return f"{name}@{self.init}" if self.init else name

    @property
    def model_name(self) -> str:
        """The name without the init, which does not change the cost of a step."""
        return replace(self, symmetric=None, init=None).name

    @property
    def is_standard(self) -> bool:
        """Whether this is the standard model, with any init."""
        return self == Variant(init=self.init)

    def resolve_inits(self, requested: Collection[InitScheme]) -> list[InitScheme]:
        """Return the inits this variant runs with; `requested` are those of --inits."""
        chosen = [self.init] if self.init else list(requested)
        if self.symmetric is None:
            return chosen
        # Other modifiers set W_Q·W_Kᵀ themselves, so nothing can be added to them.
        bases = dict.fromkeys(init.base for init in chosen if init.modifier in (None, "symmetric"))
        if not bases:
            raise InputError(
                f"variant '{self.name}' needs an init without a modifier: add gpt2 or fan_in to --inits",
                code="no-base-init",
            )
        return [InitScheme(base, "symmetric", float(self.symmetric)) for base in bases]


def parse_variant(text: str, components: ComponentRegistry | None = None) -> Variant:
    """Parse the name of a variant. The error for a wrong one has the closest valid name or an example."""
    components = components or registered_components()
    body, at, init_text = text.strip().partition("@")
    if not body:
        raise InputError(
            f"variant '{text}' has no name: use e.g. euler, leapfrog:n=7 or euler@fan_in",
            code="variant-empty",
        )
    if at and not init_text:
        raise InputError(
            f"variant '{text}' has no init after '@': use e.g. {body}@fan_in", code="variant-init-missing"
        )
    kinds = {name: kind for kind, group in components.names.items() for name in group}
    fields: dict[str, str] = {}
    for component in body.split("+"):
        kind, spec = _parse_component(component, text, kinds)
        if kind in fields:
            raise InputError(
                f"variant '{text}' has two components of the kind {kind} ({fields[kind]}, {spec}): use one",
                code="duplicate-component",
            )
        if kind in components.validators:
            components.validators[kind](spec)
        fields[kind] = spec
    return Variant(
        coupling=fields.get("coupling", NO_COUPLING),
        scoring=fields.get("scoring", SOFTMAX),
        slow_path=fields.get("slow_path"),
        pace=fields.get("pace"),
        symmetric=fields.get("symmetric"),
        init=InitScheme.parse(init_text) if at else None,
    )


def parse_variants(texts: Collection[str], components: ComponentRegistry | None = None) -> list[Variant]:
    """Parse a list of names, each of which may be comma-separated; duplicates are dropped."""
    components = components or registered_components()
    items = [item for text in texts for item in text.split(",") if item.strip()]
    return list(dict.fromkeys(parse_variant(item, components) for item in items))


def _parse_component(component: str, variant: str, kinds: Mapping[str, str]) -> tuple[str, str]:
    """Return the kind of a component and its canonical text; for `symmetric` and `pace`, their number."""
    head, *options = component.split(":")
    match = _COMPONENT.fullmatch(head)
    if match is None:
        raise InputError(
            f"variant '{variant}': '{component}' is not a component: use e.g. leapfrog:n=7",
            code="variant-syntax",
        )
    name, value = match["name"], match["value"]
    if name not in kinds:
        raise unknown("variant", name, kinds)
    kind = kinds[name]
    if kind == "pace":
        pace = _canonical_positive(value)
        if pace is None or options:
            raise InputError(
                f"variant '{variant}': pace needs one number above zero, e.g. standard+pace=4",
                code="invalid-pace",
            )
        return kind, pace
    for option in options:
        if not _OPTION.fullmatch(option):
            raise InputError(
                f"variant '{variant}': '{option}' is not an option: use e.g. {name}:n=7",
                code="variant-option-syntax",
            )
    if value is not None:
        raise InputError(
            f"variant '{variant}': options follow a colon, e.g. {name}:n={value}",
            code="variant-option-syntax",
        )
    if kind == "symmetric":
        c = _canonical_positive(options[0].removeprefix("c=") if options else DEFAULT_SYMMETRIC_C)
        if len(options) > 1 or c is None:
            raise InputError(
                f"variant '{variant}': symmetric takes one number above zero, e.g. symmetric:c=3",
                code="invalid-symmetric",
            )
        return kind, c
    return kind, ":".join([name, *options])


def _canonical_positive(text: str | None) -> str | None:
    """Return the canonical text of a number above zero (4, not 4.0), or None for any other text."""
    if text is None or not re.fullmatch(_NUMBER, text) or not 0 < float(text) < math.inf:
        return None
    return repr(float(text)).removesuffix(".0").replace("e+", "e")
