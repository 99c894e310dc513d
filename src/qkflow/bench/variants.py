"""Who is timed against standard attention, at which level, and the proof that each is correct."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qkflow.attention import Attention, couplings, merge, scorings
from qkflow.errors import InputError, unknown
from qkflow.models import AttentionConfig, Block, Decoder, ModelConfig, generate
from qkflow.models.cpu_decoder import PackedWeights

LEVELS = ("attention", "block", "model", "decode")
STEP_COUNTS = (1, 3, 7)
ROUND_MULTIPLIER = {"decode": 8}  # a round's turns, where calls are short; elsewhere one


@dataclass(frozen=True)
class BenchShape:
    """The size everything is timed at; the default is one layer of the 60m preset."""

    dim: int = 512
    n_heads: int = 8
    n_kv_heads: int | None = None
    seq_len: int = 512
    batch_size: int = 4
    n_layers: int = 2  # at level `model`
    decode_n_layers: int = 8
    vocab_size: int = 8_192  # at level `model`
    decode_vocab_size: int = 50_257
    decode_tokens: int = 4  # decoded per call: in short turns what else the machine does hits both of a pair

    def model_config(self, coupling: str, scoring: str, level: str) -> ModelConfig:
        decode = level == "decode"
        return ModelConfig(
            vocab_size=self.decode_vocab_size if decode else self.vocab_size,
            n_layers=self.decode_n_layers if decode else self.n_layers,
            dim=self.dim,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            attention=AttentionConfig(coupling=coupling, scoring=scoring),
        )


@dataclass(frozen=True)
class BenchVariant:
    """One row of the table."""

    name: str
    coupling: str = "none"
    scoring: str = "softmax"
    steps: int | None = None
    use_reference: bool = False  # run the coupling's reference instead of its fast form
    merged: bool = False

    @property
    def label(self) -> str:
        return self.name if self.steps is None else f"{self.name} n={self.steps}"


STANDARD = BenchVariant("standard")


def all_variants() -> list[BenchVariant]:
    """Standard against itself (the noise floor), every registered coupling, the textbook form, the peers."""
    rows = [BenchVariant("none")]
    for name in couplings.names():
        if name == "none":
            continue
        if name == "drift":  # n steps of it are one step n times as large
            rows.append(BenchVariant("drift", "drift"))
            rows.append(BenchVariant("drift merged", "drift", merged=True))
        elif "steps" in couplings.options(name):
            rows += [BenchVariant(name, f"{name}:n={n}", steps=n) for n in STEP_COUNTS]
        else:
            rows.append(BenchVariant(name, name))
    rows.append(BenchVariant("textbook leapfrog", "leapfrog:n=7", steps=7, use_reference=True))
    rows += [BenchVariant(name, scoring=name) for name in scorings.names() if name != "softmax"]
    rows.append(BenchVariant("affine+differential", "affine", "differential"))
    return rows


def select_variants(names: str | None) -> list[BenchVariant]:
    """The variants whose variant or label is named, e.g. `euler,leapfrog n=7,textbook leapfrog`."""
    everyone = all_variants()
    if not names:
        return everyone
    chosen = []
    for name in (part.strip() for part in names.split(",")):
        found = [row for row in everyone if name in (row.name, row.label)]
        if not found:
            raise unknown("variant", name, {row.label for row in everyone})
        chosen += found
    return chosen


class ReferenceCoupling(couplings.Coupling):
    """A coupling that runs its reference."""

    def __init__(self, coupling: couplings.Coupling) -> None:
        super().__init__(coupling.head_shapes)
        self.coupling = coupling

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.coupling.reference(q, k)

    def reference(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.coupling.reference(q, k)


def build_module(
    variant: BenchVariant, level: str, shape: BenchShape, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    config = shape.model_config(variant.coupling, variant.scoring, level)
    module: nn.Module
    if level == "attention":
        module = Block(config, 0, device=device, dtype=dtype).attention
    elif level == "block":
        module = Block(config, 0, device=device, dtype=dtype)
    else:
        module = Decoder(config, seed=0, device=device, dtype=dtype)
    if variant.use_reference:
        for layer in module.modules():
            if isinstance(layer, Attention):
                layer.coupling = ReferenceCoupling(layer.coupling)
    if variant.merged:
        merge(module)
    return module


def make_training_step(
    module: nn.Module, level: str, shape: BenchShape, device: torch.device, dtype: torch.dtype
) -> Callable[[], object]:
    """One training step: forward, backward, and for a whole model the optimizer."""
    generator = torch.Generator().manual_seed(0)
    size = (shape.batch_size, shape.seq_len)
    if level == "model":
        assert isinstance(module, Decoder)
        ids = torch.randint(shape.vocab_size, size, generator=generator).to(device)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

        def step() -> None:
            logits = module.logits(module(ids))
            nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step
    x = torch.randn(*size, shape.dim, generator=generator).to(device, dtype).requires_grad_()
    signal = torch.randn(*size, shape.dim, generator=generator).to(device, dtype)

    def pass_both_ways() -> None:
        module(x).backward(signal)
        x.grad = None
        for parameter in module.parameters():
            parameter.grad = None

    return pass_both_ways


@torch.no_grad()
def share_equal_weights(model: nn.Module, standard: nn.Module) -> None:
    """Let a model use the memory of another for every weight in which they are equal.

    Decoding reads each weight once a token, and where in memory it lies matters more than a coupling does.
    """
    theirs = dict(standard.named_parameters())
    for name, own in model.named_parameters():
        if name in theirs and torch.equal(own, theirs[name]):
            own.data = theirs[name].data


def make_decode_step(
    model: Decoder, shape: BenchShape, device: torch.device, packed_weights: PackedWeights | None = None
) -> Callable[[], object]:
    """Decode `shape.tokens` tokens greedily, as `generate` does, after a prompt that is already cached."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(shape.decode_vocab_size, (1, shape.seq_len), generator=generator).to(device)
    caches = model.new_caches(1, shape.seq_len + shape.decode_tokens)
    model.eval()
    with torch.inference_mode():
        model(prompt, caches=caches)
        read = generate.make_decode_step(
            model, caches, batch_size=1, n_tokens=shape.seq_len, packed_weights=packed_weights
        )

    @torch.inference_mode()
    def decode() -> None:
        for cache in caches:
            cache.crop(shape.seq_len)
        token = prompt[:, -1]
        for _ in range(shape.decode_tokens):
            token = read(token).argmax(-1)

    return decode


def max_reference_error(variant: BenchVariant, shape: BenchShape) -> float:
    """Largest float64 difference between the fast layer and its textbook reference, gradients included."""
    small = dataclasses.replace(shape, seq_len=24, batch_size=2)
    module = build_module(variant, "attention", small, torch.device("cpu"), torch.float64)
    assert isinstance(module, Attention)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():  # away from the start, where couplings may be the identity
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    x = torch.randn(2, 24, shape.dim, generator=generator, dtype=torch.float64)
    x = x / shape.dim**0.5
    signal = torch.randn(2, 24, shape.dim, generator=generator, dtype=torch.float64)

    def results(out: Tensor) -> list[Tensor]:
        grads = torch.autograd.grad(out, list(module.parameters()), signal, materialize_grads=True)
        return [out.detach(), *grads]

    fast, slow = results(module(x)), results(module.reference(x)[0])
    return max(
        float((a - b).abs().max() / b.abs().max().clamp_min(1.0)) for a, b in zip(fast, slow, strict=True)
    )


def verify_all(variants: list[BenchVariant], shape: BenchShape, tolerance: float = 1e-10) -> dict[str, float]:
    """Check everyone; a contestant that is wrong stops the benchmark before anything is timed."""
    errors = {}
    for row in variants:
        errors[row.label] = max_reference_error(row, shape)
        if not errors[row.label] <= tolerance:
            raise InputError(
                f"'{row.label}' differs from its textbook reference by {errors[row.label]:.1e} (allowed: "
                f"{tolerance:.0e}): nothing is timed until it is correct"
            )
    return errors
