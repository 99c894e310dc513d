"""The names of what is compared: `leapfrog:n=7+differential@fan_in`.

A variant is a sum of parts, each from one registry, and optionally the start it is held to:

    standard                          softmax attention, nothing added
    euler   leapfrog:n=7              a coupling, with its options
    affine+differential               a coupling and a scoring, in either order
    symmetric   symmetric:c=3         standard attention whose W_Q starts as W_Q + c·W_K
    slow:closed   dense-matched       a timescale
    standard+pace=4                   a query-key circuit that learns 4 times faster
    euler@fan_in   standard@fan_in+symmetric=1     held to one start instead of trying every one asked for

Option names and values are checked by the part they belong to; this module knows only which parts exist.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from qkflow.errors import InputError, unknown

STANDARD = "standard"
NO_COUPLING = "none"  # what a run's config says where nothing is coupled
SOFTMAX = "softmax"
START_MODIFIERS = ("symmetric",)  # what may follow a start's name: `fan_in+symmetric=1`
SYMMETRIC_C = "1"

Names = Mapping[str, Collection[str]]

# Parts that have no registry of their own.
_FIXED: dict[str, tuple[str, ...]] = {
    "standard": (STANDARD,),
    "start": ("gpt2", "fan_in", "mimetic"),
    "symmetric": ("symmetric",),
    "timescale": ("slow", "dense-matched"),
    "pace": ("pace",),
}
# Where each registry lives, and what it held when this was written, for when it is not importable.
_REGISTRIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "coupling": (
        "qkflow.attention.couplings",
        ("euler", "leapfrog", "uncoupled", "affine", "drift"),
    ),
    "scoring": ("qkflow.attention.scorings", (SOFTMAX, "differential", "differential_v2")),
}

_OPTION = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(=[A-Za-z0-9_.\-]+)?")
_PART = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_\-]*)(=(?P<value>[A-Za-z0-9_.\-]+))?")


def known_names() -> dict[str, Collection[str]]:
    """Every part there is, by kind; the registries are asked, so a part added there is known here."""
    names: dict[str, Collection[str]] = dict(_FIXED)
    for kind, (module, fallback) in _REGISTRIES.items():
        try:
            names[kind] = tuple(importlib.import_module(module).names())
        except (ModuleNotFoundError, AttributeError):
            names[kind] = fallback
    return names


@dataclass(frozen=True)
class Start:
    """Where training starts from: a named start and what is added to it."""

    base: str
    modifiers: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return "+".join([self.base, *(f"{name}={value}" for name, value in self.modifiers)])

    def without(self, modifier: str) -> Start:
        return Start(self.base, tuple(pair for pair in self.modifiers if pair[0] != modifier))

    def symmetric(self, c: str) -> Start:
        return Start(self.base, (*self.without("symmetric").modifiers, ("symmetric", c)))


@dataclass(frozen=True)
class Variant:
    """One contestant: at most one part of each kind, the start it is held to if any."""

    coupling: str = NO_COUPLING
    scoring: str = SOFTMAX
    timescale: str | None = None
    pace: str | None = None
    symmetric: str | None = None  # the c of the symmetric start, added to every start it runs from
    start: Start | None = None

    @property
    def name(self) -> str:
        """The canonical spelling: the same contestant always has the same name."""
        parts = [self.coupling] if self.coupling != NO_COUPLING else []
        parts += [self.scoring] if self.scoring != SOFTMAX else []
        parts += [self.timescale] if self.timescale else []
        if self.symmetric:
            parts.append("symmetric" if self.symmetric == SYMMETRIC_C else f"symmetric:c={self.symmetric}")
        if self.pace:
            parts += [f"pace={self.pace}"] if parts else [STANDARD, f"pace={self.pace}"]
        name = "+".join(parts) or STANDARD
        return f"{name}@{self.start}" if self.start else name

    @property
    def model(self) -> str:
        """The name of the model alone, whatever it starts from: what decides its cost."""
        return replace(self, symmetric=None, start=None).name

    @property
    def is_standard(self) -> bool:
        """Whether this is the plain model, from whatever start."""
        return self == Variant(start=self.start)

    def starts(self, asked: Collection[Start]) -> list[Start]:
        """The starts this variant runs from, given those a comparison asks for."""
        chosen = [self.start] if self.start else list(asked)
        if self.symmetric is None:
            return chosen
        # Mimetic already fixes W_Q·W_Kᵀ: a symmetric part on top of it is a different thing.
        able = [start for start in chosen if start.base != "mimetic"]
        if not able:
            raise InputError(f"variant '{self.name}' needs a start other than mimetic, e.g. symmetric@fan_in")
        return list(dict.fromkeys(start.symmetric(self.symmetric) for start in able))


def parse_start(text: str, names: Names | None = None) -> Start:
    """Read `gpt2`, `fan_in`, `fan_in+symmetric=1`."""
    names = names or known_names()
    base, *rest = text.strip().split("+")
    if base not in names["start"]:
        raise unknown("start", base, names["start"])
    modifiers = []
    for item in rest:
        key, _, value = item.partition("=")
        if key not in START_MODIFIERS:
            raise unknown(f"addition to start '{base}'", key, START_MODIFIERS)
        if not re.fullmatch(r"\d+(\.\d+)?", value):
            raise InputError(f"start '{text}': '{item}' needs a number, e.g. {base}+{key}=1")
        modifiers.append((key, value))
    return Start(base, tuple(modifiers))


def parse_variant(text: str, names: Names | None = None) -> Variant:
    """Read one variant; a wrong one is refused with the nearest valid name or an example."""
    names = names or known_names()
    body, at, start_text = text.strip().partition("@")
    if not body:
        raise InputError(f"variant '{text}' is empty; write e.g. euler, leapfrog:n=7 or euler@fan_in")
    if at and not start_text:
        raise InputError(f"variant '{text}' names no start after '@'; write e.g. {body}@fan_in")
    kinds = {name: kind for kind, group in names.items() if kind != "start" for name in group}
    fields: dict[str, str] = {}
    for part in body.split("+"):
        kind, spec = _read_part(part, text, kinds)
        if kind in fields:
            raise InputError(
                f"variant '{text}' has two of one kind ({kind}: {fields[kind]}, {spec}); give at most one"
            )
        fields[kind] = spec
    return Variant(
        coupling=fields.get("coupling", NO_COUPLING),
        scoring=fields.get("scoring", SOFTMAX),
        timescale=fields.get("timescale"),
        pace=fields.get("pace"),
        symmetric=fields.get("symmetric"),
        start=parse_start(start_text, names) if at else None,
    )


def parse_variants(texts: Collection[str], names: Names | None = None) -> list[Variant]:
    """Read a list whose items may themselves be comma-separated; repeats are dropped."""
    names = names or known_names()
    items = [item for text in texts for item in text.split(",") if item.strip()]
    return list(dict.fromkeys(parse_variant(item, names) for item in items))


def _read_part(part: str, variant: str, kinds: Mapping[str, str]) -> tuple[str, str]:
    """The kind of one part and its canonical text (of `symmetric` and `pace`: their number)."""
    head, *options = part.split(":")
    match = _PART.fullmatch(head)
    if match is None:
        raise InputError(f"variant '{variant}': cannot read '{part}'; write e.g. leapfrog:n=7")
    name, value = match["name"], match["value"]
    if name not in kinds:
        raise unknown("variant", name, kinds)
    kind = kinds[name]
    for option in options:
        if not _OPTION.fullmatch(option):
            raise InputError(f"variant '{variant}': cannot read option '{option}'; write e.g. {name}:n=7")
    if kind == "pace":
        if not _is_positive(value) or options:
            raise InputError(f"variant '{variant}': pace needs one number above zero, e.g. standard+pace=4")
        return kind, str(value)
    if value is not None:
        raise InputError(f"variant '{variant}': options follow a colon, e.g. {name}:n={value}")
    if kind == "symmetric":
        c = options[0].removeprefix("c=") if options else SYMMETRIC_C
        if len(options) > 1 or not _is_positive(c):
            raise InputError(f"variant '{variant}': symmetric takes one number, e.g. symmetric:c=3")
        return kind, c
    return kind, ":".join([name, *options])


def _is_positive(text: str | None) -> bool:
    return text is not None and bool(re.fullmatch(r"\d+(\.\d+)?", text)) and float(text) > 0
