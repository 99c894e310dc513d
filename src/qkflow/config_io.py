"""Convert plain data from YAML, JSON and flags into typed dataclasses."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from qkflow.errors import InputError, shorten, unknown

ConfigT = TypeVar("ConfigT")
TYPE_DESCRIPTIONS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}

# Keys of a config that were renamed, by their full path: an old one is refused with the new one's name.
RENAMED_KEYS = {
    "model.vocabulary": "model.vocab_size",
    "model.layers": "model.n_layers",
    "model.width": "model.dim",
    "model.heads": "model.n_heads",
    "model.kv_heads": "model.n_kv_heads",
    "model.head_size": "model.head_dim",
    "model.hidden": "model.hidden_dim",
    "model.tied": "model.tie_embeddings",
    "model.start": "model.init",
    "model.slow.layers": "model.slow.n_layers",
    "model.slow.hidden": "model.slow.hidden_dim",
    "model.slow.start": "model.slow.gate_init",
    "model.slow.output": "model.slow.output_init",
    "slow.layers": "slow.n_layers",
    "slow.hidden": "slow.hidden_dim",
    "slow.start": "slow.gate_init",
    "slow.output": "slow.output_init",
    "rope.low": "rope.low_freq_factor",
    "rope.high": "rope.high_freq_factor",
    "rope.original_length": "rope.original_max_position_embeddings",
    "coupling.hidden": "coupling.hidden_dim",
    "data.length": "data.seq_len",
    "train.batch": "train.batch_size",
    "train.final_lr": "train.min_lr_factor",
    "train.decay": "train.decay_ratio",
    "train.checkpoint_blocks": "train.activation_checkpointing",
    "train.keep": "train.keep_latest_k",
    "config.starts": "config.inits",  # of a study.yaml
    "config.length": "config.seq_len",
    "config.batch": "config.batch_size",
    "config.layers": "config.n_layers",
    "config.width": "config.dim",
    "config.heads": "config.n_heads",
}


@dataclass(frozen=True)
class Range:
    """Bounds of a number, as `Annotated[int, Range(1, 1000)]` in a dataclass or the signature of a command.

    low, high    the smallest and the largest value; `above` and `below` exclude their own value
    cost         what a larger value would cost: the end of the sentence that refuses it
    """

    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    cost: str = ""

    def check(self, name: str, value: float) -> None:
        """Raise InputError for a value outside the range, and for NaN."""
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{name} must be a finite number, not {value}", code="not-finite")
        if value < self.low or value <= self.above:
            least = f"at least {self.low:,}" if value < self.low else f"above {self.above:g}"
            raise InputError(f"{name} must be {least}, not {value}", code="below-minimum")
        if value > self.high or value >= self.below:
            most = f"at most {self.high:,}" if value > self.high else f"below {self.below:g}"
            reason = f": {self.cost}" if self.cost else ""
            raise InputError(f"{name} must be {most}, not {shorten(value)}{reason}", code="above-maximum")


MAX_SEED = 2**64 - 1
Count = Annotated[int, Range(1, 10**9)]
Positive = Annotated[float, Range(above=0)]
NonNegative = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1)]
Percentage = Annotated[float, Range(above=0, below=100)]
Confidence = Annotated[float, Range(0.5, below=1)]
Seed = Annotated[int, Range(-(2**63), MAX_SEED)]
THREADS = Range(1, 4096, cost="no machine has as many cores")


def range_of(hint: Any) -> Range | None:
    """Return the range in a type such as `Annotated[int, Range(1)] | None`; None if it has none."""
    if get_origin(hint) is Annotated:
        ranges = [item for item in get_args(hint) if isinstance(item, Range)]
        return ranges[0] if ranges else range_of(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return next((found for kind in get_args(hint) if (found := range_of(kind))), None)
    return None


def check_ranges(config: Any, key_path: str) -> None:
    """Raise InputError for a number of a dataclass that is outside the range of its field."""
    for name, bounds in _field_ranges(type(config)).items():  # type: ignore[arg-type]
        value = getattr(config, name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            bounds.check(f"{key_path}.{name}" if key_path else f"--{name.replace('_', '-')}", value)


@functools.cache
def _field_ranges(cls: type) -> dict[str, Range]:
    hints = get_type_hints(cls, include_extras=True)
    return {name: found for name, hint in hints.items() if (found := range_of(hint))}


def dataclass_from_dict(cls: type[ConfigT], values: Any, key_path: str) -> ConfigT:
    """Build a dataclass from plain data. Raise InputError for an unknown key or a value of the wrong type."""
    hints = get_type_hints(cls)
    for key in check_mapping(values, key_path):
        if not isinstance(key, str) or key not in hints:
            raise unknown_key(key_path, str(key), hints)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise InputError(f"{key_path}.{field.name} is missing", code="missing-key")
    return cls(**{key: _coerce(value, hints[key], f"{key_path}.{key}") for key, value in values.items()})


def coerce_field(cls: type, name: str, value: Any, key_path: str) -> Any:
    """Convert one value to the type of a field of a dataclass. Raise as `dataclass_from_dict` does."""
    hints = get_type_hints(cls)
    if name not in hints:
        raise unknown_key(key_path, name, hints)
    return _coerce(value, hints[name], f"{key_path}.{name}")


def unknown_key(key_path: str, key: str, known: Iterable[str]) -> InputError:
    """Return the error for a key that section `key_path` does not have; a renamed key gets its new name."""
    new = RENAMED_KEYS.get(f"{key_path}.{key}")
    if new is not None:
        return InputError(f"{key_path}.{key} was renamed: write {new}", code="renamed-key")
    return unknown(f"key of {key_path}", key, known)


def check_mapping(values: Any, key_path: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise InputError(
            f"'{key_path}' must be a mapping of keys to values, not {shorten(values)}", code="not-a-mapping"
        )
    return values


def parse_count(text: str | int | float) -> int:
    """Read a number of tokens: 50000, 200k, 1M, 1.5m, 3e6."""
    match = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?(?:e\+?\d+)?)([kmgb]?)", str(text).strip().lower())
    error = InputError(
        f"'{text}' is not a number of tokens: write e.g. 200k, 1M or 50000", code="invalid-count"
    )
    if match is None:
        raise error
    scale = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}[match[2]]
    number = float(match[1].replace("_", "")) * scale
    # 1.1M is an integer up to rounding
    if not math.isfinite(number) or abs(number - round(number)) > 1e-9 * number:
        raise error
    return round(number)


def _coerce(value: Any, hint: Any, key_path: str) -> Any:
    """Convert `value` to the type `hint`. YAML reads 3e-3 and 1M as strings; they become numbers here."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return None
    for kind in kinds:
        if get_origin(kind) is Literal and isinstance(value, str | int) and value in get_args(kind):
            return value
        if get_origin(kind) in (dict, Mapping) and isinstance(value, dict):
            item_type = get_args(kind)[1]
            if item_type is Any:
                return value
            return {str(key): _coerce(item, item_type, f"{key_path}.{key}") for key, item in value.items()}
        if get_origin(kind) in (tuple, list) and isinstance(value, list | tuple):
            return get_origin(kind)(_coerce(item, get_args(kind)[0], key_path) for item in value)
        if dataclasses.is_dataclass(kind) and isinstance(value, kind):  # type: ignore[arg-type]
            return value
        if kind in (str, bool) and isinstance(value, kind):
            return value
        if kind in (int, float) and not isinstance(value, bool):
            try:
                number = float(value) if kind is float else _coerce_int(value)
            except (ValueError, TypeError, OverflowError):
                continue
            if not math.isfinite(number):
                raise InputError(f"{key_path} must be a finite number, not {value}", code="not-finite")
            return number
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    if choices:
        key = key_path.rpartition(".")[2].replace("_", "-")
        raise unknown(key_path, str(value), choices, code=f"unknown-{key}")
    expected = " or ".join(_describe_type(kind) for kind in kinds if kind is not type(None))
    raise InputError(f"{key_path} must be {expected}, not {shorten(value)}", code="wrong-type")


def _coerce_int(value: Any) -> int:
    if isinstance(value, int):
        return value
    text = str(value)[:400]
    return -parse_count(text[1:]) if text.startswith("-") else parse_count(text)


def _describe_type(kind: Any) -> str:
    if get_origin(kind) in (tuple, list):
        choices = get_args(get_args(kind)[0]) or ("a", "b")
        return f"a list, e.g. [{', '.join(map(str, choices))}]"
    return (
        "a mapping of keys to values"
        if get_origin(kind) in (dict, Mapping)
        else TYPE_DESCRIPTIONS.get(kind, str(kind))
    )


def check_utf8(name: str, text: str) -> None:
    """Raise InputError for a command-line argument that is not valid UTF-8 (a path may be)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{name} is not valid UTF-8: write it as UTF-8 text", code="not-utf8") from None
