"""Who is timed against standard attention, at which level, and the proof that each is correct."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qkflow.attention import Attention, couplings, merge, scorings
from qkflow.errors import InputError, unknown
from qkflow.models import AttentionConfig, Block, Decoder, ModelConfig
from qkflow.models.decoding import Layouts
from qkflow.models.generate import one_by_one

LEVELS = ("attention", "block", "model", "decode")
STEPS = (1, 3, 7)
TURNS = {"decode": 8}  # a round's turns, where calls are short; elsewhere one


@dataclass(frozen=True)
class Shape:
    """The size everything is timed at; the default is one layer of the 60m preset."""

    width: int = 512
    heads: int = 8
    kv_heads: int | None = None
    length: int = 512
    batch: int = 4
    layers: int = 2  # at level `model`
    decode_layers: int = 8
    vocabulary: int = 8_192  # at level `model`
    decode_vocabulary: int = 50_257
    tokens: int = 4  # decoded per call: in short turns what else the machine does hits both of a pair

    def config(self, coupling: str, scoring: str, level: str) -> ModelConfig:
        decode = level == "decode"
        return ModelConfig(
            vocabulary=self.decode_vocabulary if decode else self.vocabulary,
            layers=self.decode_layers if decode else self.layers,
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads,
            attention=AttentionConfig(coupling=coupling, scoring=scoring),
        )


@dataclass(frozen=True)
class Contestant:
    """One row of the table."""

    variant: str
    coupling: str = "none"
    scoring: str = "softmax"
    steps: int | None = None
    textbook: bool = False  # run the coupling's reference instead of its fast form
    merged: bool = False

    @property
    def label(self) -> str:
        return self.variant if self.steps is None else f"{self.variant} n={self.steps}"


STANDARD = Contestant("standard")


def contestants() -> list[Contestant]:
    """Standard against itself (the noise floor), every registered coupling, the textbook form, the peers."""
    rows = [Contestant("none")]
    for name in couplings.names():
        if name == "none":
            continue
        if name == "drift":  # n steps of it are one step n times as large
            rows.append(Contestant("drift", "drift"))
            rows.append(Contestant("drift merged", "drift", merged=True))
        elif "steps" in couplings.options(name):
            rows += [Contestant(name, f"{name}:n={n}", steps=n) for n in STEPS]
        else:
            rows.append(Contestant(name, name))
    rows.append(Contestant("textbook leapfrog", "leapfrog:n=7", steps=7, textbook=True))
    rows += [Contestant(name, scoring=name) for name in scorings.names() if name != "softmax"]
    rows.append(Contestant("affine+differential", "affine", "differential"))
    return rows


def choose(names: str | None) -> list[Contestant]:
    """The contestants whose variant or label is named, e.g. `euler,leapfrog n=7,textbook leapfrog`."""
    everyone = contestants()
    if not names:
        return everyone
    chosen = []
    for name in (part.strip() for part in names.split(",")):
        found = [row for row in everyone if name in (row.variant, row.label)]
        if not found:
            raise unknown("variant", name, {row.label for row in everyone})
        chosen += found
    return chosen


class Textbook(couplings.Coupling):
    """A coupling that runs its reference."""

    def __init__(self, coupling: couplings.Coupling) -> None:
        super().__init__(coupling.heads)
        self.coupling = coupling

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.coupling.reference(q, k)

    def reference(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.coupling.reference(q, k)


def build(row: Contestant, level: str, shape: Shape, device: torch.device, dtype: torch.dtype) -> nn.Module:
    config = shape.config(row.coupling, row.scoring, level)
    module: nn.Module
    if level == "attention":
        module = Block(config, 0, device=device, dtype=dtype).attention
    elif level == "block":
        module = Block(config, 0, device=device, dtype=dtype)
    else:
        module = Decoder(config, seed=0, device=device, dtype=dtype)
    if row.textbook:
        for layer in module.modules():
            if isinstance(layer, Attention):
                layer.coupling = Textbook(layer.coupling)
    if row.merged or level == "decode":
        merge(module)  # as anyone would who deploys it
    return module


def training_call(
    module: nn.Module, level: str, shape: Shape, device: torch.device, dtype: torch.dtype
) -> Callable[[], object]:
    """One training step: forward, backward, and for a whole model the optimizer."""
    generator = torch.Generator().manual_seed(0)
    size = (shape.batch, shape.length)
    if level == "model":
        assert isinstance(module, Decoder)
        ids = torch.randint(shape.vocabulary, size, generator=generator).to(device)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

        def step() -> None:
            logits = module.logits(module(ids))
            nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step
    x = torch.randn(*size, shape.width, generator=generator).to(device, dtype).requires_grad_()
    signal = torch.randn(*size, shape.width, generator=generator).to(device, dtype)

    def pass_both_ways() -> None:
        module(x).backward(signal)
        x.grad = None
        for parameter in module.parameters():
            parameter.grad = None

    return pass_both_ways


@torch.no_grad()
def share_weights(model: nn.Module, standard: nn.Module) -> None:
    """Let a model use the memory of another for every weight in which they are equal.

    Decoding reads each weight once a token, and where in memory it lies matters more than a coupling does.
    """
    theirs = dict(standard.named_parameters())
    for name, own in model.named_parameters():
        if name in theirs and torch.equal(own, theirs[name]):
            own.data = theirs[name].data


def decoding_call(
    model: Decoder, shape: Shape, device: torch.device, layouts: Layouts | None = None
) -> Callable[[], object]:
    """Decode `shape.tokens` tokens greedily, as `generate` does, after a prompt that is already cached."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(shape.decode_vocabulary, (1, shape.length), generator=generator).to(device)
    caches = model.new_caches(1, shape.length + shape.tokens)
    model.eval()
    with torch.inference_mode():
        model(prompt, caches=caches)
        read = one_by_one(model, caches, batch=1, count=shape.length, layouts=layouts)

    @torch.inference_mode()
    def decode() -> None:
        for cache in caches:
            cache.rewind(shape.length)
        token = prompt[:, -1]
        for _ in range(shape.tokens):
            token = read(token).argmax(-1)

    return decode


def verify(row: Contestant, shape: Shape) -> float:
    """Largest float64 difference between the fast layer and its textbook reference, gradients included."""
    small = dataclasses.replace(shape, length=24, batch=2)
    module = build(row, "attention", small, torch.device("cpu"), torch.float64)
    assert isinstance(module, Attention)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():  # away from the start, where couplings may be the identity
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    x = torch.randn(2, 24, shape.width, generator=generator, dtype=torch.float64)
    x = x / shape.width**0.5
    signal = torch.randn(2, 24, shape.width, generator=generator, dtype=torch.float64)

    def results(out: Tensor) -> list[Tensor]:
        grads = torch.autograd.grad(out, list(module.parameters()), signal, materialize_grads=True)
        return [out.detach(), *grads]

    fast, slow = results(module(x)), results(module.reference(x)[0])
    return max(
        float((a - b).abs().max() / b.abs().max().clamp_min(1.0)) for a, b in zip(fast, slow, strict=True)
    )


def verify_all(rows: list[Contestant], shape: Shape, tolerance: float = 1e-10) -> dict[str, float]:
    """Check everyone; a contestant that is wrong stops the benchmark before anything is timed."""
    errors = {}
    for row in rows:
        errors[row.label] = verify(row, shape)
        if not errors[row.label] <= tolerance:
            raise InputError(
                f"'{row.label}' differs from its textbook reference by {errors[row.label]:.1e} (allowed: "
                f"{tolerance:.0e}): nothing is timed until it is correct"
            )
    return errors
