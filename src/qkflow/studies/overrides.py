"""Overrides of config keys in a variant: `standard{attention.qk_norm=true,train.lr=1e-3}`.

Any key of a run's config is an override, except those that the study sets itself. `attention.X` is short for
`model.attention.X`, and `slow.X` for `model.slow.X`. An override is a key and the canonical text of its
value, so that equal variants have equal names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import yaml

from qkflow.config_io import coerce_field
from qkflow.errors import InputError, unknown
from qkflow.models.config import AttentionConfig, ModelConfig
from qkflow.models.slow_path.config import SlowPathConfig
from qkflow.plain_data import parse_yaml
from qkflow.training.config import DataConfig, TrainConfig

Overrides = tuple[tuple[str, str], ...]  # (key, canonical text of the value), sorted by key

# section of a key -> path in the config, and the dataclass with its keys
SECTIONS: dict[str, tuple[str, type]] = {
    "attention": ("model.attention", AttentionConfig),
    "model": ("model", ModelConfig),
    "slow": ("model.slow", SlowPathConfig),
    "train": ("train", TrainConfig),
    "data": ("data", DataConfig),
}

_SET_BY_STUDY = {
    **dict.fromkeys(("train.tokens", "train.steps", "train.minutes"), "use --tokens or --minutes"),
    "train.seed": "use --seeds",
    "train.device": "use --device",
    "train.parallel": "use --jobs",
    "data.corpus": "use --data",
    "data.fingerprint": "it is the corpus of --data",
    "model.preset": "use --preset",
    "model.init": "write the init after the variant, e.g. standard@fan_in",
    "model.attention": "write its keys as attention.KEY, e.g. attention.qk_norm",
    "model.slow": "write its keys as slow.KEY, e.g. slow.ratio",
    "attention.coupling": "write it as a component, e.g. euler",
    "attention.scoring": "write it as a component, e.g. differential",
    **dict.fromkeys(
        (
            *("train.evaluations", "train.eval_every", "train.eval_tokens", "train.probe_every"),
            "train.final_eval_tokens",
            *("train.log_every", "train.save_every", "train.save_minutes", "train.keep_latest_k"),
            "train.writers",
        ),
        "it is the same for all runs",
    ),
}
# Braces, and quotes that are not apostrophes within a word, would end or open a part of the variant.
_SPECIAL = re.compile(r"[\[\]{}\"\\]|(?<![A-Za-z0-9])'")
_PLAIN_TEXT = re.compile(r"[A-Za-z0-9_./:\-]*[A-Za-z0-9_./\-]")
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")  # YAML reads 1e-3 as text


@dataclass(frozen=True)
class ConfigSections:
    """Values by section of a run config; `attention` and `slow` are within `model`."""

    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)


def canonical_override(key: str, text: str) -> tuple[str, str]:
    """Return the canonical key and text of an override; raise if a variant may not set it."""
    key = _canonical_key(key)
    section, _, name = key.partition(".")
    path, cls = SECTIONS[section]
    return key, format_value(coerce_field(cls, name, _read(key, text), path))


def override_value(key: str, text: str) -> Any:
    """Return the value of a canonical override, in the type of its key."""
    section, _, name = key.partition(".")
    path, cls = SECTIONS[section]
    return coerce_field(cls, name, _read(key, text), path)


def to_sections(overrides: Overrides) -> ConfigSections:
    """Return overrides as sections of a run config."""
    sections = ConfigSections()
    for key, text in overrides:
        path, _ = SECTIONS[key.partition(".")[0]]
        top, *nested = path.split(".")
        values = getattr(sections, top)
        for part in nested:
            values = values.setdefault(part, {})
        value = override_value(key, text)
        values[key.partition(".")[2]] = list(value) if isinstance(value, tuple) else value
    return sections


def config_keys() -> list[str]:
    """Return all keys that a variant may set."""
    keys = [f"{section}.{item.name}" for section, (_, cls) in SECTIONS.items() for item in fields(cls)]
    return [key for key in keys if key not in _SET_BY_STUDY]


def _canonical_key(key: str) -> str:
    for section in ("attention", "slow"):
        if key.startswith(f"model.{section}."):
            key = key.removeprefix("model.")
    if key in _SET_BY_STUDY:
        raise InputError(f"a variant cannot set {key}: {_SET_BY_STUDY[key]}", code="key-set-by-study")
    if key.partition(".")[0] not in SECTIONS:
        raise unknown("key of a variant", key, config_keys())
    return key


def _read(key: str, text: str) -> Any:
    try:
        return _read_exponents(parse_yaml(text, "the value"))
    except InputError:
        raise InputError(f"{key}: '{text}' is not valid YAML", code="invalid-yaml") from None


def _read_exponents(value: Any) -> Any:
    """Convert 1e-3 within lists and mappings to a number; elsewhere the type of the key decides."""

    def convert(item: Any) -> Any:
        if isinstance(item, str) and _EXPONENT.fullmatch(item):
            return float(item)
        return _read_exponents(item)

    if isinstance(value, list):
        return [convert(item) for item in value]
    return {name: convert(item) for name, item in value.items()} if isinstance(value, dict) else value


def format_value(value: Any) -> str:
    """Return the canonical text of a value, which reads back as the same."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return format_number(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{format_value(k)}: {format_value(v)}" for k, v in sorted(value.items())) + "}"
    if isinstance(value, Iterable) and not isinstance(value, str):
        return "[" + ",".join(format_value(item) for item in value) + "]"
    if _PLAIN_TEXT.fullmatch(value) and _parses_to(value, value):
        return str(value)
    # as an item of a list, so that text with a comma is quoted
    text = yaml.safe_dump([value], default_flow_style=True, width=1 << 20, allow_unicode=True).strip()[1:-1]
    if not _SPECIAL.search(value) and text == text.strip() and _parses_to(text, value):
        return text
    return '"' + "".join(c if c.isascii() and c.isalnum() else f"\\U{ord(c):08x}" for c in value) + '"'


def _parses_to(text: str, value: str) -> bool:
    try:
        return bool(parse_yaml(text, "") == value)
    except InputError:
        return False


def format_number(value: float) -> str:
    """Return the shortest text of a number: 4, not 4.0, and 1e20, not 1e+20."""
    return str(value) if isinstance(value, int) else repr(value).removesuffix(".0").replace("e+", "e")
