"""The form of a paper's study: its claim and the comparisons that test it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from qkflow.studies.compare import Comparison

FindingsFn = Callable[[Comparison], dict[str, Any]]


@dataclass(frozen=True)
class Stage:
    """One comparison of a study."""

    name: str
    variants: tuple[str, ...]
    token_multiplier: int = 1


@dataclass(frozen=True)
class PaperStudy:
    """A paper's claim and the comparisons that test it. `findings` computes results beyond losses."""

    paper: str
    claim: str
    tokens: str
    seeds: int
    stages: tuple[Stage, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    findings: FindingsFn | None = None
