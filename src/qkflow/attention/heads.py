"""How many heads of which size each part of attention sees."""

from __future__ import annotations

from dataclasses import dataclass

from qkflow.errors import InputError


@dataclass(frozen=True)
class HeadShapes:
    """Head counts and sizes between the projections and the scores.

    Query head h reads key head h // group: contiguous groups, as everywhere in the field.
    """

    n_q: int
    n_k: int
    n_v: int
    head_dim: int  # of a query and of a key
    v_head_dim: int
    n_out: int  # heads that scoring writes
    out_head_dim: int

    def __post_init__(self) -> None:
        if self.n_q % self.n_k:
            raise InputError(f"{self.n_q} query heads cannot be shared out over {self.n_k} key heads")

    @property
    def group_size(self) -> int:
        """Query heads per key head."""
        return self.n_q // self.n_k
