"""Every registered part, in every option that changes its mathematics; new parts appear by themselves."""

from __future__ import annotations

import torch
from torch import nn

from qkflow.attention import couplings, scorings
from qkflow.attention.projections import HeadShapes

OPTIONS = (
    "steps=3",
    "steps=7",
    "bias=true",
    "steps=3:bias=true",
    "shared=true",
    "step_per=layer",
    "learn_step=false",
    "conservative=true",
    "steps=3:conservative=true:bias=true",
)


def coupling_specs() -> list[str]:
    specs = []
    for name in couplings.names():
        known = set(couplings.options(name))
        specs.append(name)
        for option in OPTIONS:
            if {pair.split("=")[0] for pair in option.split(":")} <= known:
                specs.append(f"{name}:{option}")
    return specs


def scoring_specs() -> list[str]:
    return scorings.names()


HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}


def heads(kind: str, size: int = 6) -> HeadShapes:
    queries, keys = HEADS[kind]
    return HeadShapes(queries, keys, keys, size, size, queries, size)


def scatter(module: nn.Module, scale: float = 0.4) -> nn.Module:
    """Move every parameter away from its start, so that no promise holds by accident."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return module
