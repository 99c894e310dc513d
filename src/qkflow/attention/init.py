"""Parameter init, drawn from named random streams.

A stream is seeded by (seed, full parameter name). Two models that differ in one part share the init of every
parameter they have in common, so that differences between variants are paired.

Inits are written `BASE` or `BASE+MODIFIER`:

| base | every matrix | residual outputs |
|---|---|---|
| `gpt2` | N(0, 0.02²) | further scaled by 1/√(2·layers) |
| `fan_in` | N(0, 0.7²/fan-in), close to PyTorch's default | the same |

| modifier | attention matrices |
|---|---|
| `symmetric=c` | W_Q + c·W_K per head: a token attends to tokens like itself |
| `mimetic` | W_Q·W_Kᵀ ≈ 0.7·Z + 0.7·I, W_O·W_V ≈ 0.4·Z − 0.4·I (Trockman & Kolter 2023, arXiv 2305.09828) |
| `scaled_identity=s` | s·I when factorized, U(±1/√dim) when collapsed (Vashisht & Ramaswamy 2026) |

A modifier alone uses the base of its source: `symmetric=1` is `fan_in+symmetric=1`, the other two use
`gpt2`.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from qkflow.errors import InputError, unknown

BASE_INITS = ("gpt2", "fan_in")
INIT_MODIFIERS = {"symmetric": 1.0, "mimetic": 0.7, "scaled_identity": 1e-6}
DEFAULT_BASE = {"symmetric": "fan_in", "mimetic": "gpt2", "scaled_identity": "gpt2"}


@dataclass(frozen=True)
class InitScheme:
    """A base init and an optional modifier of the attention matrices with its strength."""

    base: str = "gpt2"
    modifier: str | None = None
    strength: float = 0.0

    @classmethod
    def parse(cls, text: str | InitScheme) -> InitScheme:
        if isinstance(text, InitScheme):
            return text
        parts = text.replace(" ", "").split("+")
        base = parts.pop(0) if parts[0] in BASE_INITS else None
        if base and not parts:
            return cls(base)
        modifier = parts.pop(0)
        match = re.fullmatch(r"(\w+?)(?:=([^()]+)|\((?:c=)?([^()]+)\))?", modifier)
        name = match[1] if match else modifier
        if match is None or parts or name not in INIT_MODIFIERS:
            raise unknown(
                "init",
                text,
                [*BASE_INITS, *(f"{b}+{m}" for b in BASE_INITS for m in INIT_MODIFIERS), *INIT_MODIFIERS],
            )
        number = match[2] or match[3]
        try:
            strength = float(number) if number else INIT_MODIFIERS[name]
        except ValueError:
            raise InputError(f"init '{text}': '{number}' is not a number", code="bad-init-strength") from None
        if not math.isfinite(strength):
            raise InputError(f"init '{text}': '{number}' is not a finite number", code="bad-init-strength")
        return cls(base or DEFAULT_BASE[name], name, strength)

    def __str__(self) -> str:
        if self.modifier is None:
            return self.base
        strength = "" if self.modifier == "mimetic" else f"={self.strength:g}"
        return f"{self.base}+{self.modifier}{strength}"


@dataclass(frozen=True)
class ParamSampler:
    """Samples the parameters of one module; `prefix` is the name of the module in the model."""

    scheme: InitScheme
    seed: int
    n_layers: int
    prefix: str = ""

    def generator(self, name: str) -> torch.Generator:
        key = f"{self.seed}/{self.prefix}.{name}".encode()
        number = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
        return torch.Generator().manual_seed(number)

    def normal(self, name: str, shape: torch.Size | tuple[int, ...], std: float) -> Tensor:
        # on the CPU in float64: the same numbers on every device and in every dtype
        return torch.randn(shape, generator=self.generator(name), dtype=torch.float64) * std

    def uniform(self, name: str, shape: torch.Size | tuple[int, ...], bound: float) -> Tensor:
        return torch.rand(shape, generator=self.generator(name), dtype=torch.float64) * (2 * bound) - bound

    def matrix(
        self, name: str, shape: torch.Size | tuple[int, ...], fan_in: int, *, residual: bool = False
    ) -> Tensor:
        """Sample a weight matrix of the base; `residual` marks an output to the residual stream."""
        if self.scheme.base == "fan_in":
            return self.normal(name, shape, 0.7 / fan_in**0.5)
        return self.normal(name, shape, 0.02 / (2 * self.n_layers) ** 0.5 if residual else 0.02)

    def init_linear(self, name: str, layer: nn.Linear, *, residual: bool = False) -> None:
        """Init a linear layer: its matrix from the base, its bias at zero."""
        copy_into(
            layer.weight,
            self.matrix(f"{name}.weight", layer.weight.shape, layer.in_features, residual=residual),
        )
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


@runtime_checkable
class SupportsInit(Protocol):
    """A module that initializes its own parameters."""

    def init_parameters(self, sampler: ParamSampler) -> None: ...


@torch.no_grad()
def initialize(
    model: nn.Module, init: str | InitScheme = "gpt2", *, seed: int | None = None, n_layers: int = 1
) -> None:
    """Init every parameter of `model`; the default seed comes from PyTorch's global generator."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return  # no storage: the model is initialized when it is materialized
    if seed is None:
        seed = int(torch.randint(2**62, ()))
    parsed = InitScheme.parse(init)
    for name, module in model.named_modules():
        if isinstance(module, SupportsInit):
            module.init_parameters(ParamSampler(parsed, seed, n_layers, name))


@torch.no_grad()
def copy_into(parameter: Tensor, values: Tensor) -> None:
    """Copy values into a parameter, in its dtype."""
    parameter.copy_(values.to(parameter.dtype))
