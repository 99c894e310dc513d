"""Read YAML, JSON and JSON Lines that others may have written: the only way such a file enters the program.

Every reader refuses what is not a regular file, what is too large, and what is nested too deeply, before it
costs time or memory. Values are plain: dicts with text keys, lists, text, numbers, booleans, None. A
missing file raises `FileNotFoundError` or `NotADirectoryError`, so that callers can tell what they expected;
everything else is an `InputError` that names the file.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import yaml

from qkflow.errors import InputError, shorten

MAX_BYTES = 64 << 20  # of a JSON file
MAX_YAML_BYTES = 4 << 20  # of a YAML file: a study of 10,000 runs has 2 MB
MAX_LOG_BYTES = 1 << 30  # of a JSON Lines file, which grows with the run
MAX_LINE_BYTES = 256 << 20
MAX_DEPTH = 64
MAX_NODES = 250_000  # of YAML, after aliases are expanded: a study of 10,000 runs has 130,000
MAX_NUMBER = 1e30  # of a measurement
_INT_DIGITS = 20  # 2^64 has as many
_LONE_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading. A folder, device, pipe or socket is refused; none is waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise InputError(f"cannot read {path}: {_reason(error)}", code="unreadable-file") from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise InputError(f"{path} is {describe_mode(mode)}: a file is needed here", code="not-a-file")
    return os.fdopen(descriptor, "rb")


def describe_mode(mode: int) -> str:
    """Return what a path is that is no regular file."""
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((name for is_kind, name in kinds if is_kind(mode)), "a device")


def read_bytes(path: str | Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file of at most `max_bytes`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise InputError(
                f"{path} has {size:,} bytes: a file of this kind has at most {max_bytes:,}",
                code="file-too-large",
            )
        try:
            return file.read(max_bytes)
        except OSError as error:
            raise InputError(f"cannot read {path}: {_reason(error)}", code="unreadable-file") from None


def read_text(path: str | Path, max_bytes: int = MAX_BYTES, *, code: str = "not-utf8") -> str:
    """Return the content of a text file in UTF-8."""
    try:
        return read_bytes(path, max_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not a text file ({_reason(error)})", code=code) from None


def read_json(path: str | Path, max_bytes: int = MAX_BYTES, *, code: str = "invalid-json") -> Any:
    """Return the values of a JSON file. NaN, infinities and numbers beyond float64 become None."""
    return parse_json(read_bytes(path, max_bytes), str(path), code=code)


def read_yaml(path: str | Path, *, code: str = "invalid-yaml", text_code: str | None = None) -> Any:
    """Return the values of a YAML file: the types of JSON only. `dataclass_from_dict` refuses NaN, by key."""
    return parse_yaml(read_text(path, MAX_YAML_BYTES, code=text_code or code), str(path), code=code)


def parse_json(text: str | bytes, source: str, *, code: str = "invalid-json") -> Any:
    """Parse JSON as `read_json` does; errors name `source`."""
    try:
        decoded = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        values = load_json(decoded)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source} is not valid JSON ({_reason(error)})", code=code) from None
    return values


def load_json(text: str) -> Any:
    """Parse JSON; raise ValueError or RecursionError for what is not."""
    values = _DECODER.decode(text)
    if text.count("[") + text.count("{") > MAX_DEPTH:  # else it cannot be deeper
        _check_depth(values)
    return _without_surrogates(values) if _LONE_SURROGATE.search(text) else values


def parse_yaml(text: str, source: str, *, code: str = "invalid-yaml") -> Any:
    """Parse YAML as `read_yaml` does; errors name `source`."""
    try:
        values = yaml.load(text, _PlainLoader)  # a SafeLoader with fewer types, and with limits
    except (yaml.YAMLError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
        raise InputError(f"{source} is not valid YAML ({_reason(error)})", code=code) from None
    return _without_surrogates(values) if _LONE_SURROGATE.search(text) else values


def iter_lines(stream: BinaryIO, source: object) -> Iterator[bytes]:
    """Yield the lines of a stream; refuse one that would not fit into memory."""
    while line := stream.readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES:
            raise InputError(
                f"{source} has a line of more than {MAX_LINE_BYTES:,} bytes", code="file-too-large"
            )
        yield line


def is_number(value: Any, *, or_none: bool = False) -> bool:
    """Return whether a value of a file is a number that sums and means of it cannot overflow with."""
    if value is None:
        return or_none
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def has_layout(value: Any, layout: Any) -> bool:
    """Return whether values of a file are laid out as a reader expects them. Other keys may be present.

    layout    a type (int: at least 0, float: any number), a dict of keys and their layouts, or {str: layout}
              for a mapping whose keys are names
    """
    if not isinstance(layout, dict):
        if layout in (int, float):
            return is_number(value) and (layout is float or (isinstance(value, int) and value >= 0))
        return isinstance(value, layout)
    if not isinstance(value, dict):
        return False
    if str in layout:
        return all(has_layout(item, layout[str]) for item in value.values())
    return all(has_layout(value.get(key), inner) for key, inner in layout.items())


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return f"nested more than {MAX_DEPTH} levels deep"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        text = f"{error.problem}, line {error.problem_mark.line + 1}"
    else:
        text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"{text[:199]}…"


def _finite_float(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def _int(text: str) -> int | float | None:
    return int(text) if len(text) <= _INT_DIGITS else _finite_float(text)


_DECODER = json.JSONDecoder(parse_float=_finite_float, parse_int=_int, parse_constant=lambda name: None)


def _check_depth(values: Any) -> None:
    level = [values]
    for _ in range(MAX_DEPTH + 1):
        children: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                children += value.values()
            elif isinstance(value, list):
                children += value
        level = children
        if not level:
            return
    raise RecursionError


def _without_surrogates(value: Any) -> Any:
    """Replace half a character, which no file and no terminal can hold."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return value


class _PlainLoader(yaml.SafeLoader):
    """A SafeLoader for the types of JSON, with limits on depth and on the expansion of aliases."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._count = 0
        self._sizes: dict[int, int] = {}  # nodes of a node, aliases expanded

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise yaml.YAMLError(f"nested more than {MAX_DEPTH} levels deep")
        is_alias, before = self.check_event(yaml.AliasEvent), self._count
        node = super().compose_node(parent, index)
        if is_alias and id(node) not in self._sizes:
            raise yaml.YAMLError("an alias refers to itself")
        self._count += self._sizes[id(node)] if is_alias else 1
        if self._count > MAX_NODES:
            raise yaml.YAMLError(f"more than {MAX_NODES:,} values once its aliases are expanded")
        if isinstance(node, yaml.MappingNode) and not is_alias:
            _check_distinct_keys(node)
        self._sizes.setdefault(id(node), self._count - before)
        self._depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep=True)
        for key in mapping:
            if not isinstance(key, str | int | float | bool | None):
                raise yaml.YAMLError(f"the key {shorten(key)} is not text")
        return {key if isinstance(key, str) else str(key): value for key, value in mapping.items()}

    def construct_int(self, node: Any) -> int:
        if len(node.value) > 3 * _INT_DIGITS:
            raise yaml.constructor.ConstructorError(
                None, None, f"{shorten(node.value)} is not a number", node.start_mark
            )
        return self.construct_yaml_int(node)

    def refuse(self, node: Any) -> NoReturn:
        raise yaml.constructor.ConstructorError(None, None, f"the tag {node.tag} is refused", node.start_mark)


def _check_distinct_keys(node: yaml.MappingNode) -> None:
    """Refuse a key that is written twice: YAML would drop the first value silently."""
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {shorten(key.value)} is there twice", problem_mark=key.start_mark
                )
            seen.add(key.value)


_TAG = "tag:yaml.org,2002:"
_PlainLoader.yaml_constructors = {
    f"{_TAG}null": yaml.SafeLoader.construct_yaml_null,
    f"{_TAG}bool": yaml.SafeLoader.construct_yaml_bool,
    f"{_TAG}int": _PlainLoader.construct_int,
    f"{_TAG}float": yaml.SafeLoader.construct_yaml_float,
    f"{_TAG}str": yaml.SafeLoader.construct_yaml_str,
    f"{_TAG}seq": yaml.SafeLoader.construct_yaml_seq,
    f"{_TAG}map": yaml.SafeLoader.construct_yaml_map,
    None: _PlainLoader.refuse,
}
_PlainLoader.yaml_implicit_resolvers = {  # a date stays text
    letter: [(tag, pattern) for tag, pattern in resolvers if tag != f"{_TAG}timestamp"]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
