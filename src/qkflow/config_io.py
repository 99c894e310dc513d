"""Plain data, as YAML, JSON and flags give it, read into typed dataclasses."""

from __future__ import annotations

import dataclasses
import math
import re
import types
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from qkflow.errors import InputError, unknown

ConfigT = TypeVar("ConfigT")
TYPE_DESCRIPTIONS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def dataclass_from_dict(cls: type[ConfigT], values: Any, key_path: str) -> ConfigT:
    """A dataclass from plain data: every key known, every value of its type."""
    hints = get_type_hints(cls)
    for key in check_mapping(values, key_path):
        if key not in hints:
            raise unknown(f"key of {key_path}", str(key), hints)
    return cls(**{key: _coerce(value, hints[key], f"{key_path}.{key}") for key, value in values.items()})


def check_mapping(values: Any, key_path: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise InputError(f"'{key_path}' must be a mapping of keys to values, not {values!r}")
    return values


def parse_count(text: str | int | float) -> int:
    """Read a number of tokens: 50000, 200k, 1M, 1.5m, 3e6."""
    match = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?(?:e\+?\d+)?)([kmgb]?)", str(text).strip().lower())
    wrong = InputError(f"'{text}' is not a number of tokens: write e.g. 200k, 1M or 50000")
    if match is None:
        raise wrong
    scale = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}[match[2]]
    number = float(match[1].replace("_", "")) * scale
    # 1.1M is whole but for rounding
    if not math.isfinite(number) or abs(number - round(number)) > 1e-9 * number:
        raise wrong
    return round(number)


def _coerce(value: Any, hint: Any, key_path: str) -> Any:
    """`value` as the type `hint`. YAML reads 3e-3 and 1M as texts; here they become numbers."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return None
    for kind in kinds:
        if get_origin(kind) is Literal and value in get_args(kind):
            return value
        if get_origin(kind) is dict and isinstance(value, dict):
            return value
        if get_origin(kind) in (tuple, list) and isinstance(value, list | tuple):
            return get_origin(kind)(_coerce(one, get_args(kind)[0], key_path) for one in value)
        if dataclasses.is_dataclass(kind) and isinstance(value, kind):  # type: ignore[arg-type]
            return value
        if kind in (str, bool) and isinstance(value, kind):
            return value
        if kind in (int, float) and not isinstance(value, bool):
            try:
                return (
                    float(value) if kind is float else value if isinstance(value, int) else parse_count(value)
                )
            except (ValueError, TypeError, OverflowError):
                continue
    choices = [one for kind in kinds if get_origin(kind) is Literal for one in get_args(kind)]
    if choices:
        raise unknown(key_path, str(value), choices)
    wanted = " or ".join(_describe_type(kind) for kind in kinds if kind is not type(None))
    raise InputError(f"{key_path} must be {wanted}, not {value!r}")


def _describe_type(kind: Any) -> str:
    if get_origin(kind) in (tuple, list):
        choices = get_args(get_args(kind)[0]) or ("a", "b")
        return f"a list, e.g. [{', '.join(map(str, choices))}]"
    return (
        "a mapping of keys to values" if get_origin(kind) is dict else TYPE_DESCRIPTIONS.get(kind, str(kind))
    )


def check_seed(name: str, seed: int) -> None:
    """Refuse what no generator of random numbers can start from."""
    if not -(2**63) <= seed < 2**64:
        raise InputError(f"{name} must lie between -2^63 and 2^64, not at {seed}")


def check_utf8(name: str, text: str) -> None:
    """Refuse bytes of the command line that are no text; as a path they would be fine."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{name} is not valid UTF-8: give it as UTF-8 text") from None
