"""The text of a variant, `components{overrides}@init`, split into its parts; nothing is looked up here.

Items in braces are separated by commas. An item with `=` starts a key; an item without adds a value to the
key before it: `euler{step=0,0.1,1}` is a sweep of three values. Several sweeps multiply.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from qkflow.errors import InputError

Assignment = tuple[str, str]  # key and value, as written

_CLOSING = {"{": "}", "[": "]"}
_QUOTES = ("'", '"')
_ITEM = re.compile(r"(?P<key>[A-Za-z_][A-Za-z0-9_.\-]*)\s*=(?P<value>.*)", re.DOTALL)


def split_outside_braces(text: str, separator: str) -> list[str]:
    """Split at a character, except within braces, brackets and quoted values."""
    items: list[str] = []
    open_until: list[str] = []  # the characters that close what is open
    start, previous = 0, ""
    for position, character in enumerate(text):
        if open_until and open_until[-1] in _QUOTES:
            if character == open_until[-1]:
                open_until.pop()
        elif character in _QUOTES and previous in (*"=,:[{", ""):  # an apostrophe within a word opens nothing
            open_until.append(character)
        elif character in _CLOSING:
            open_until.append(_CLOSING[character])
        elif open_until and character == open_until[-1]:
            open_until.pop()
        elif character == separator and not open_until:
            items.append(text[start:position])
            start = position + 1
        previous = previous if character.isspace() else character
    return [*items, text[start:]]


@dataclass(frozen=True)
class VariantText:
    """The parts of a variant's text. `sweeps` has the values of each key, in the order they are written."""

    text: str
    components: str
    sweeps: tuple[tuple[str, tuple[str, ...]], ...] = ()
    init: str | None = None

    @classmethod
    def parse(cls, text: str) -> VariantText:
        body, *inits = split_outside_braces(text.strip(), "@")
        init = "@".join(inits).strip() if inits else None
        components, brace, rest = body.strip().partition("{")
        if not components.strip():
            raise InputError(
                f"variant '{text}' has no name: use e.g. euler, leapfrog:n=7 or euler@fan_in",
                code="variant-empty",
            )
        if init == "":
            raise InputError(
                f"variant '{text}' has no init after '@': use e.g. {components}@fan_in",
                code="variant-init-missing",
            )
        return cls(text, components.strip(), _parse_braces(text, rest) if brace else (), init)

    @property
    def count(self) -> int:
        """The number of variants that the sweeps expand to."""
        return math.prod(len(values) for _, values in self.sweeps)

    def expand(self) -> Iterator[tuple[Assignment, ...]]:
        """Yield the assignments of every variant; the last key changes fastest."""
        keys = [key for key, _ in self.sweeps]
        for values in itertools.product(*(values for _, values in self.sweeps)):
            yield tuple(zip(keys, values, strict=True))


def _parse_braces(text: str, rest: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Parse what follows the opening brace."""
    example = "write e.g. euler{step=0.1,train.lr=1e-3}@fan_in"
    # a closing brace that belongs to the text would be the end of an item
    inner, *after = split_outside_braces(rest, "}")
    if len(after) != 1:
        raise InputError(f"variant '{text}': the braces are not balanced: {example}", code="variant-syntax")
    if after[0].strip():
        raise InputError(
            f"variant '{text}' continues after the braces with '{after[0].strip()}': the braces follow the "
            f"last component, {example}",
            code="variant-syntax",
        )
    sweeps: dict[str, list[str]] = {}
    for item in split_outside_braces(inner, ","):
        match = _ITEM.fullmatch(item.strip())
        value = (match["value"] if match else item).strip()
        if match and match["key"] in sweeps:
            raise duplicate_key(text, match["key"])
        if not match and not sweeps:
            raise InputError(f"variant '{text}': '{value}' has no key: {example}", code="variant-syntax")
        key = match["key"] if match else next(reversed(sweeps))
        if not value:
            raise InputError(
                f"variant '{text}': {key} has an empty value: write e.g. {key}=1, or {key}=1,2 for a sweep",
                code="empty-sweep",
            )
        sweeps.setdefault(key, []).append(value)
    return tuple((key, tuple(values)) for key, values in sweeps.items())


def duplicate_key(text: str, key: str) -> InputError:
    return InputError(
        f"variant '{text}' sets {key} twice: keep one, or write a sweep such as {key}=1,2",
        code="duplicate-key",
    )
