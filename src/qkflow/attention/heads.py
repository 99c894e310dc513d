"""How many heads of which size each part of attention sees."""

from __future__ import annotations

from dataclasses import dataclass

from qkflow.errors import InputError


@dataclass(frozen=True)
class Heads:
    """Head counts and sizes between the projections and the scores.

    Query head h reads key head h // group: contiguous groups, as everywhere in the field.
    """

    queries: int
    keys: int
    values: int
    size: int  # of a query and of a key
    value_size: int
    outputs: int  # heads that scoring writes
    output_size: int

    def __post_init__(self) -> None:
        if self.queries % self.keys:
            raise InputError(f"{self.queries} query heads cannot be shared out over {self.keys} key heads")

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.queries // self.keys
