"""Parameter init, drawn from named random streams.

A stream is seeded by (seed, full parameter name). Two models that differ in one part share the init of every
parameter they have in common, so that differences between variants are paired.

Inits are written `BASE`, `BASE+MODIFIER`, `BASE{PART=VALUE,…}` or `BASE{PART=VALUE,…}+MODIFIER`:

| base | every matrix | residual outputs |
|---|---|---|
| `gpt2` | N(0, 0.02²) | further scaled by 1/√(2·layers) |
| `fan_in` | N(0, 0.7²/fan-in), close to PyTorch's default | the same |
| `modern` | N(0, 0.6²/fan-in) | zero: every block starts as the identity |

| modifier | attention matrices |
|---|---|
| `symmetric=c` | W_Q + c·W_K per head, c of any sign: with c > 0 a token attends to tokens like itself |
| `symmetric_score=s` | `symmetric`, c such that a token's expected score with itself is s, at any width |
| `random_partner=c` | W_Q + c·P, P drawn like W_K, of its norm: as large as `symmetric=c`, not symmetric |
| `tied_qk` | W_Q starts equal to W_K (Saponati et al. 2025, arXiv 2502.10927) |
| `zero_q` | W_Q = 0: uniform attention (muP, arXiv 2203.03466) |
| `mimetic` | W_Q·W_Kᵀ ≈ 0.7·Z + 0.7·I, W_O·W_V ≈ 0.4·Z − 0.4·I (Trockman & Kolter 2023, arXiv 2305.09828) |
| `scaled_identity=s` | s·I when factorized, U(±1/√dim) when collapsed (Vashisht & Ramaswamy 2026) |

| part | matrices |
|---|---|
| `{qk=VALUE}` | W_Q and W_K, or the collapsed W_QK |
| `{ov=VALUE}` | W_V |
| `{out=VALUE}` | residual outputs: W_O (or the collapsed W_OV) and the down matrix of the feed-forward |
| `{mlp=VALUE}` | up and gate matrices of the feed-forward |
| `{embed=VALUE}` | embedding, whose fan-in is dim |
| `{head=VALUE}` | output matrix if it is not tied to the embedding; default: as the embedding |

The value of a part is a base, `zero` (ov, out and head only) or a number a, which means N(0, a²/fan-in); the
other parts take the base: `fan_in{qk=gpt2,out=zero}+symmetric=1`. Networks of couplings and scorings always
take the base. A modifier alone uses the base of its source: `gpt2` for `mimetic` and `scaled_identity`,
`fan_in` for the others (`symmetric=1` is `fan_in+symmetric=1`).

The embedding and an untied head of `modern` are drawn like its other matrices. modded-nanogpt draws N(0, 1)
and zero, which needs learning rates of their own: with one rate for all, `head=zero` trains worse.

The score of `symmetric_score` is that of an input of unit RMS through the added part, without a query-key
norm: s = c·√head_dim·σ²·dim, where σ is the standard deviation of W_K.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from typing import Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor, nn

from qkflow.errors import InputError, unknown

BASE_INITS = ("gpt2", "fan_in", "modern")
# modifiers and their default number; None: the modifier takes no number
INIT_MODIFIERS: dict[str, float | None] = {
    "symmetric": 1.0,
    "symmetric_score": 1.0,
    "random_partner": 1.0,
    "tied_qk": None,
    "zero_q": None,
    "mimetic": 0.7,
    "scaled_identity": 1e-6,
}
# modifiers that set W_Q, W_K, W_V and W_O on their own; the others change W_Q alone
CIRCUIT_MODIFIERS = ("mimetic", "scaled_identity")
Part = Literal["qk", "ov", "out", "mlp", "embed", "head"]
INIT_PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True)
class InitScheme:
    """A base init, an optional modifier of the attention matrices, and parts that differ from the base."""

    base: str = "gpt2"
    modifier: str | None = None
    strength: float = 0.0
    parts: tuple[tuple[str, str], ...] = ()  # (part, value) in the order of INIT_PARTS

    @classmethod
    def parse(cls, text: str | InitScheme) -> InitScheme:
        """Read the text of an init; spaces are ignored."""
        if isinstance(text, InitScheme):
            return text
        compact = "".join(text.split())
        match = re.fullmatch(r"(\w+)(?:\{([^{}]*)\})?(?:\+(.+))?", compact)
        if match is None or match[1] not in BASE_INITS:
            name, strength = _parse_modifier(text, None, compact)
            return cls("gpt2" if name in CIRCUIT_MODIFIERS else "fan_in", name, strength)
        base, body, modifier = match.groups()
        parts = _parse_parts(text, base, body or "")
        scheme = cls(base, parts=parts)
        if modifier:
            scheme = cls(base, *_parse_modifier(text, base, modifier), parts)
        scheme._check_parts()
        return scheme

    def value(self, part: str) -> str:
        """Return how a part is drawn: a base, `zero` or a number."""
        parts = dict(self.parts)
        return parts.get(part) or (parts.get("embed", self.base) if part == "head" else self.base)

    def _check_parts(self) -> None:
        """Raise for parts that would never get a gradient, or that the modifier overwrites."""
        for part, reason in {
            "qk": "with W_Q = W_K = 0 neither gets a gradient: use zero_q",
            "mlp": "a gated feed-forward with up = gate = 0 gets no gradient: use out=zero",
            "embed": "a zero embedding gets no gradient",
        }.items():
            if self.value(part) == "zero":
                raise InputError(f"init '{self}': {reason}", code="init-without-gradient")
        # the residual outputs of `modern` are zero
        if self.value("ov") == "zero" and self.value("out") in ("zero", "modern"):
            raise InputError(
                f"init '{self}': with W_V = W_O = 0 neither gets a gradient: set one of ov, out to a number",
                code="init-without-gradient",
            )
        for part, _ in self.parts:
            if self.modifier in CIRCUIT_MODIFIERS and part in ("qk", "ov"):
                raise InputError(
                    f"init '{self}': {self.modifier} sets W_Q, W_K, W_V and W_O itself: remove {part}=",
                    code="init-part-unused",
                )

    def __str__(self) -> str:
        parts = ",".join(f"{part}={value}" for part, value in self.parts)
        text = f"{self.base}{{{parts}}}" if parts else self.base
        if self.modifier is None:
            return text
        default = INIT_MODIFIERS[self.modifier]
        if default is None or (self.modifier == "mimetic" and self.strength == default):
            return f"{text}+{self.modifier}"
        return f"{text}+{self.modifier}={_format_number(self.strength)}"


def _parse_modifier(text: str, base: str | None, modifier: str) -> tuple[str, float]:
    """Return the name and the number of a modifier of the init `text`."""
    number_pattern = r"(?:[eE]\+|[^()+])+"  # a + within a number is part of an exponent
    match = re.fullmatch(rf"(\w+?)(?:=({number_pattern})|\((?:c=)?({number_pattern})\))?", modifier)
    name = match[1] if match else modifier
    if match is None or name not in INIT_MODIFIERS:
        bases = (base,) if base else BASE_INITS
        combined = [f"{b}+{m}" for b in bases for m in INIT_MODIFIERS] if "+" in text else []
        raise unknown("init", text, combined or [*BASE_INITS, *INIT_MODIFIERS])
    number, default = match[2] or match[3], INIT_MODIFIERS[name]
    if default is None:
        if number:
            raise InputError(f"init '{text}': {name} takes no number", code="bad-init-strength")
        return name, 0.0
    return name, _parse_number(text, number, "bad-init-strength") if number else default


def _parse_parts(text: str, base: str, body: str) -> tuple[tuple[str, str], ...]:
    """Return the parts that differ from the base, in canonical form."""
    values: dict[str, str] = {}
    for item in filter(None, body.split(",")):
        part, _, value = item.partition("=")
        if part not in INIT_PARTS:
            raise unknown(f"part of init '{text}'", part, INIT_PARTS, code="unknown-init-part")
        if part in values:
            raise InputError(f"init '{text}' has {part} twice", code="duplicate-init-part")
        values[part] = _canonical_value(text, part, value)
    defaults = {part: _canonical_value(text, part, base) for part in INIT_PARTS}
    defaults["head"] = values.get("embed", base)
    return tuple(
        (part, values[part]) for part in INIT_PARTS if part in values and values[part] != defaults[part]
    )


def _canonical_value(text: str, part: str, value: str) -> str:
    """Return the value of a part, with one spelling for values that draw the same matrices."""
    if value not in (*BASE_INITS, "zero"):
        if not value or value[0].isalpha():
            known = (*BASE_INITS, "zero", "a number")
            raise unknown(f"value of {part} in init '{text}'", value, known, code="unknown-init-value")
        number = _parse_number(text, value, "bad-init-value")
        if number < 0:
            raise InputError(
                f"init '{text}': {part} must be zero or above, not {value}", code="bad-init-value"
            )
        same = {0.0: "zero", 0.7: "fan_in"} | ({} if part == "out" else {0.6: "modern"})
        value = same.get(number, _format_number(number))
    return "zero" if (part, value) == ("out", "modern") else value


def _parse_number(text: str, number: str, code: str) -> float:
    try:
        value = float(number)
    except ValueError:
        raise InputError(f"init '{text}': '{number}' is not a number", code=code) from None
    if not math.isfinite(value):
        raise InputError(f"init '{text}': '{number}' is not a finite number", code=code)
    return value


def _format_number(value: float) -> str:
    """Return the shortest text of a number that reads back as the same, without a + sign."""
    short = f"{value:g}"
    return (short if float(short) == value else repr(value)).replace("e+", "e")


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

    def std(self, fan_in: int, part: Part | None = None) -> float:
        """Return the standard deviation of a matrix; without a part, that of the base."""
        value = self.scheme.base if part is None else self.scheme.value(part)
        if value == "zero" or (value, part) == ("modern", "out"):
            return 0.0
        if value == "gpt2":
            return 0.02 / (2 * self.n_layers) ** 0.5 if part == "out" else 0.02
        gain = {"fan_in": 0.7, "modern": 0.6}.get(value)
        return (float(value) if gain is None else gain) / fan_in**0.5

    def matrix(
        self, name: str, shape: torch.Size | tuple[int, ...], fan_in: int, *, part: Part | None = None
    ) -> Tensor:
        """Sample a weight matrix; `part` is what a mixed init calls it (`out`: a residual output)."""
        std = self.std(fan_in, part)
        return self.normal(name, shape, std) if std else torch.zeros(shape, dtype=torch.float64)

    def init_linear(self, name: str, layer: nn.Linear, *, part: Part | None = None) -> None:
        """Init a linear layer: its matrix as `matrix` does, its bias at zero."""
        weight = self.matrix(f"{name}.weight", layer.weight.shape, layer.in_features, part=part)
        copy_into(layer.weight, weight)
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
    parsed = InitScheme.parse(init)
    if any(parameter.is_meta for parameter in model.parameters()):
        return  # no storage: the model is initialized when it is materialized
    if seed is None:
        seed = int(torch.randint(2**62, ()))
    for name, module in model.named_modules():
        if isinstance(module, SupportsInit):
            module.init_parameters(ParamSampler(parsed, seed, n_layers, name))


@torch.no_grad()
def copy_into(parameter: Tensor, values: Tensor) -> None:
    """Copy values into a parameter, in its dtype."""
    parameter.copy_(values.to(parameter.dtype))
