"""Specs of all registered couplings and scorings, with every option that changes the mathematics."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from qkflow.attention import couplings, scorings
from qkflow.attention.projections import HeadShapes

ModuleT = TypeVar("ModuleT", bound=nn.Module)

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


def heads(kind: str, head_dim: int = 6) -> HeadShapes:
    n_heads, n_kv_heads = HEADS[kind]
    return HeadShapes(n_heads, n_kv_heads, n_kv_heads, head_dim, head_dim, n_heads, head_dim)


def scatter(module: ModuleT, scale: float = 0.4) -> ModuleT:
    """Add noise to every parameter, so that no property holds only at init. Return the module."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return module
