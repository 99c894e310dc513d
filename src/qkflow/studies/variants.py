"""Names of variants: `leapfrog:n=7+differential{train.lr=1e-3}@fan_in`.

A variant is a sum of components, at most one of each kind, optionally with overrides of config keys in braces
and with a fixed init:

    standard                          softmax attention, nothing added
    euler   leapfrog:n=7              a coupling, with options
    affine+differential               a coupling and a scoring, in either order
    symmetric   symmetric:c=-1        standard attention with a modifier of every init: W_Q + c·W_K
    slow:closed   dense-matched       a slow path, or its control with equal compute
    standard+pace=4                   the query-key circuit learns 4 times faster
    standard{attention.qk_norm=true}  any key of a run's config
    euler{step=0,0.1,1}               a sweep of an option or key: three variants
    euler@fan_in   standard@fan_in+symmetric=1     one fixed init, instead of all in --inits

The registry of a component checks its options, and `config_io` the config keys. This module only lists which
components exist. `grammar` splits the text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qkflow.attention import InitScheme
from qkflow.errors import InputError
from qkflow.studies.components import (
    STANDARD,
    Component,
    ComponentRegistry,
    add_option,
    canonical_positive,
    parse_components,
    parse_option,
    registered_components,
)
from qkflow.studies.grammar import Assignment, VariantText, duplicate_key, split_outside_braces
from qkflow.studies.overrides import Overrides, canonical_override, override_value

NO_COUPLING = "none"
SOFTMAX = "softmax"


@dataclass(frozen=True)
class Variant:
    """A combination of components and overrides, with a fixed init if `init` is set."""

    coupling: str = NO_COUPLING
    scoring: str = SOFTMAX
    slow_path: str | None = None
    pace: str | None = None
    init_modifier: str | None = None  # added to every init it runs with, e.g. symmetric:c=3
    overrides: Overrides = ()
    init: InitScheme | None = None

    @property
    def name(self) -> str:
        """The canonical name: equal variants have equal names."""
        parts = [self.coupling] if self.coupling != NO_COUPLING else []
        parts += [self.scoring] if self.scoring != SOFTMAX else []
        parts += [part for part in (self.slow_path, self.init_modifier) if part]
        if self.pace:
            parts += [f"pace={self.pace}"] if parts else [STANDARD, f"pace={self.pace}"]
        name = "+".join(parts) or STANDARD
        if self.overrides:
            name += "{" + ",".join(f"{key}={value}" for key, value in self.overrides) + "}"
        return f"{name}@{self.init}" if self.init else name

    @property
    def name_without_init(self) -> str:
        return replace(self, init=None).name

    @property
    def model_name(self) -> str:
        """The name without init and modifier of the init, which do not change the cost of a step."""
        return replace(self, init_modifier=None, init=None).name

    def override(self, key: str, default: Any = None) -> Any:
        """Return the value of a config key that this variant sets, e.g. `train.lr`."""
        text = dict(self.overrides).get(key)
        return default if text is None else override_value(key, text)

    def resolve_inits(self, requested: Collection[InitScheme]) -> list[InitScheme]:
        """Return the inits this variant runs with; `requested` are those of --inits."""
        chosen = [self.init] if self.init else list(requested)
        if self.init_modifier is None:
            return chosen
        name, _, option = self.init_modifier.partition(":")
        number = f"={option.partition('=')[2]}" if option else ""
        # Other modifiers set W_Q·W_Kᵀ themselves, so nothing can be added to them.
        plain = dict.fromkeys(str(without_modifier(init)) for init in chosen if init.modifier in (None, name))
        if not plain:
            raise InputError(
                f"variant '{self.name}' needs an init without a modifier: add gpt2 or fan_in to --inits",
                code="no-base-init",
            )
        return [InitScheme.parse(f"{init}+{name}{number}") for init in plain]


def without_modifier(init: InitScheme) -> InitScheme:
    return replace(init, modifier=None, strength=0.0)


def parse_variant(text: str, components: ComponentRegistry | None = None) -> Variant:
    """Parse the name of one variant. The error for a wrong one has the closest valid name or an example."""
    parsed = VariantText.parse(text)
    if parsed.count != 1:
        raise InputError(
            f"'{text}' is a sweep of {parsed.count} variants: use one value per key", code="unexpected-sweep"
        )
    (assignments,) = parsed.expand()
    return _build_variant(parsed, assignments, components or registered_components())


def parse_variants(texts: Collection[str], components: ComponentRegistry | None = None) -> list[Variant]:
    """Parse a list of names, each of which may be comma-separated; sweeps expand, duplicates are dropped."""
    components = components or registered_components()
    variants = [
        _build_variant(parsed, assignments, components)
        for parsed in split_variants(texts)
        for assignments in parsed.expand()
    ]
    return list(dict.fromkeys(variants))


def split_variants(texts: Collection[str]) -> list[VariantText]:
    """Split a list of names at the commas outside braces, without expanding sweeps."""
    items = [item for text in texts for item in split_outside_braces(text, ",") if item.strip()]
    return [VariantText.parse(item) for item in items]


def _build_variant(
    parsed: VariantText, assignments: Sequence[Assignment], registry: ComponentRegistry
) -> Variant:
    components = parse_components(parsed.components, parsed.text, registry)
    overrides: dict[str, str] = {}
    for key, value in assignments:
        if "." not in key:
            add_option(components, key, value, parsed.text, registry)
            continue
        name, text = canonical_override(key, value)
        if name in overrides:
            raise duplicate_key(parsed.text, name)
        if not _fold_into_component(components, name, text, parsed.text):
            overrides[name] = text
    texts = {kind: each.canonical_text(parsed.text, registry) for kind, each in components.items()}
    return Variant(
        coupling=texts.get("coupling", NO_COUPLING),
        scoring=texts.get("scoring", SOFTMAX),
        slow_path=texts.get("slow_path"),
        pace=texts.get("pace"),
        init_modifier=texts.get("init_modifier"),
        overrides=tuple(sorted(overrides.items())),
        init=None if parsed.init is None else InitScheme.parse(parsed.init),
    )


def _fold_into_component(components: dict[str, Component], key: str, text: str, variant: str) -> bool:
    """Write an override as a component where both mean the same, so that equal variants have equal names."""
    if key == "train.pace" and ("pace" in components or canonical_positive(text)):
        if "pace" in components:
            raise duplicate_key(variant, "pace")
        components["pace"] = Component("pace", "pace", [("pace", text)])
        return True
    slow_path = components.get("slow_path")
    if slow_path is None or not key.startswith("slow."):
        return False
    if key != "slow.attention":
        option = f"{key.removeprefix('slow.')}={text}"
        slow_path.options.append(parse_option(option, slow_path.name, variant))
        return True
    if slow_path.name == "slow":
        return False
    raise InputError(
        f"variant '{variant}': {slow_path.name} has no slow path: remove {key}", code="no-slow-path"
    )
