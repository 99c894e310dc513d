"""The names of what is compared: `leapfrog:n=7+differential@fan_in`.

A variant is a sum of parts, each from one registry, and optionally the start it is held to:

    standard                          softmax attention, nothing added
    euler   leapfrog:n=7              a coupling, with its options
    affine+differential               a coupling and a scoring, in either order
    symmetric   symmetric:c=3         standard attention whose W_Q starts as W_Q + c·W_K
    slow:closed   dense-matched       a timescale
    standard+pace=4                   a query-key circuit that learns 4 times faster
    euler@fan_in   standard@fan_in+symmetric=1     held to one start instead of trying every one asked for

Options are checked by the registry their part belongs to; this module knows only which parts exist.
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
    """Every part there is, by kind, and who checks the options of each kind."""

    names: Mapping[str, Collection[str]]
    validators: Mapping[str, Callable[[str], Any]] = field(default_factory=dict)


def registered_components() -> ComponentRegistry:
    """What the registries hold, so that a part added there is known here."""
    kinds = {"coupling": couplings, "scoring": scorings}
    names: dict[str, Collection[str]] = {
        **_BUILTIN_COMPONENTS,
        **{kind: part.names() for kind, part in kinds.items()},
    }
    return ComponentRegistry(names, {kind: part.check for kind, part in kinds.items()})


@dataclass(frozen=True)
class Variant:
    """One contestant: at most one part of each kind, the start it is held to if any."""

    coupling: str = NO_COUPLING
    scoring: str = SOFTMAX
    slow_path: str | None = None
    pace: str | None = None
    symmetric: str | None = None  # the c of the symmetric start, added to every start it runs from
    init: InitScheme | None = None

    @property
    def name(self) -> str:
        """The canonical spelling: the same contestant always has the same name."""
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
        """The name of the model alone, whatever it starts from: what decides its cost."""
        return replace(self, symmetric=None, init=None).name

    @property
    def is_standard(self) -> bool:
        """Whether this is the plain model, from whatever start."""
        return self == Variant(init=self.init)

    def resolve_inits(self, requested: Collection[InitScheme]) -> list[InitScheme]:
        """The starts this variant runs from, given those a comparison asks for."""
        chosen = [self.init] if self.init else list(requested)
        if self.symmetric is None:
            return chosen
        # The others fix W_Q·W_Kᵀ themselves: a symmetric part on top of them would be a different thing.
        bases = dict.fromkeys(start.base for start in chosen if start.modifier in (None, "symmetric"))
        if not bases:
            raise InputError(f"variant '{self.name}' needs a plain start to add to, e.g. symmetric@fan_in")
        return [InitScheme(base, "symmetric", float(self.symmetric)) for base in bases]


def parse_variant(text: str, components: ComponentRegistry | None = None) -> Variant:
    """Read one variant; a wrong one is refused with the nearest valid name or an example."""
    components = components or registered_components()
    body, at, start_text = text.strip().partition("@")
    if not body:
        raise InputError(f"variant '{text}' is empty; write e.g. euler, leapfrog:n=7 or euler@fan_in")
    if at and not start_text:
        raise InputError(f"variant '{text}' names no start after '@'; write e.g. {body}@fan_in")
    kinds = {name: kind for kind, group in components.names.items() for name in group}
    fields: dict[str, str] = {}
    for part in body.split("+"):
        kind, spec = _parse_component(part, text, kinds)
        if kind in fields:
            raise InputError(
                f"variant '{text}' has two of one kind ({kind}: {fields[kind]}, {spec}); give at most one"
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
        init=InitScheme.parse(start_text) if at else None,
    )


def parse_variants(texts: Collection[str], components: ComponentRegistry | None = None) -> list[Variant]:
    """Read a list whose items may themselves be comma-separated; repeats are dropped."""
    components = components or registered_components()
    items = [item for text in texts for item in text.split(",") if item.strip()]
    return list(dict.fromkeys(parse_variant(item, components) for item in items))


def _parse_component(component: str, variant: str, kinds: Mapping[str, str]) -> tuple[str, str]:
    """The kind of one part and its canonical text (of `symmetric` and `pace`: their number)."""
    head, *options = component.split(":")
    match = _COMPONENT.fullmatch(head)
    if match is None:
        raise InputError(f"variant '{variant}': cannot read '{component}'; write e.g. leapfrog:n=7")
    name, value = match["name"], match["value"]
    if name not in kinds:
        raise unknown("variant", name, kinds)
    kind = kinds[name]
    for option in options:
        if not _OPTION.fullmatch(option):
            raise InputError(f"variant '{variant}': cannot read option '{option}'; write e.g. {name}:n=7")
    if kind == "pace":
        pace = _canonical_positive(value)
        if pace is None or options:
            raise InputError(f"variant '{variant}': pace needs one number above zero, e.g. standard+pace=4")
        return kind, pace
    if value is not None:
        raise InputError(f"variant '{variant}': options follow a colon, e.g. {name}:n={value}")
    if kind == "symmetric":
        c = _canonical_positive(options[0].removeprefix("c=") if options else DEFAULT_SYMMETRIC_C)
        if len(options) > 1 or c is None:
            raise InputError(f"variant '{variant}': symmetric takes one number, e.g. symmetric:c=3")
        return kind, c
    return kind, ":".join([name, *options])


def _canonical_positive(text: str | None) -> str | None:
    """A number above zero in its one spelling: 4, not 4.0; None if it is none."""
    if text is None or not re.fullmatch(_NUMBER, text) or not 0 < float(text) < math.inf:
        return None
    return repr(float(text)).removesuffix(".0").replace("e+", "e")
