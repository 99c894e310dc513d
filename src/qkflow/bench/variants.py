"""Variants and levels of `qkflow bench`, their timed functions, and the check against the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from qkflow.attention import Attention, KVCache, couplings, merge, scorings
from qkflow.attention.attention import attention_layers
from qkflow.attention.projections import HeadShapes
from qkflow.errors import InputError, unknown
from qkflow.models import AttentionConfig, Block, Decoder, ModelConfig, generate
from qkflow.models.cpu_decoder import CPUDecoder, PackedWeights
from qkflow.models.loss import linear_cross_entropy
from qkflow.models.slow_path.cache import SlowPathCache

Level = Literal["attention", "block", "model", "decode"]
LEVELS: tuple[Level, ...] = get_args(Level)
STEP_COUNTS = (1, 3, 7)
ROUND_MULTIPLIER = {"decode": 8}  # short calls need more rounds
LossFn = Callable[[Tensor, Tensor, Tensor], Tensor]  # of hidden states, output weight and targets


@dataclass(frozen=True)
class BenchShape:
    """Model and batch size of a benchmark; the default is one layer of the 60m preset."""

    dim: int = 512
    n_heads: int = 8
    n_kv_heads: int | None = None
    seq_len: int = 512
    batch_size: int = 4
    n_layers: int = 2  # at level `model`
    decode_n_layers: int = 8
    vocab_size: int = 8_192  # at level `model`
    decode_vocab_size: int = 50_257
    decode_tokens: int = 4  # per call; other load affects both calls of a short pair alike

    def model_config(self, coupling: str, scoring: str, level: Level) -> ModelConfig:
        """Return the config of the model; levels below `model` use its first block."""
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
    """A coupling and scoring to time: one row of the table."""

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
    """Return standard attention (against itself: the noise level), every registered coupling and scoring.

    A coupling with a `steps` option has a row per step count. A linear one has one row, because n steps are
    one larger step, and a row for the merged layer.
    """
    variants = [BenchVariant("none")]
    for name in couplings.names():
        if name == STANDARD.coupling:
            continue
        if is_mergeable(name):
            variants.append(BenchVariant(name, name))
            variants.append(BenchVariant(f"{name} merged", name, merged=True))
        elif "steps" in couplings.options(name):
            variants += [BenchVariant(name, f"{name}:n={n}", steps=n) for n in STEP_COUNTS]
        else:
            variants.append(BenchVariant(name, name))
    variants.append(BenchVariant("textbook leapfrog", "leapfrog:n=7", steps=7, use_reference=True))
    variants += [BenchVariant(name, scoring=name) for name in scorings.names() if name != "softmax"]
    variants.append(BenchVariant("affine+differential", "affine", "differential"))
    return variants


def is_mergeable(coupling: str) -> bool:
    """Whether the coupling is a linear drift, which `merge` folds into the query projection."""
    return couplings.build(coupling, HeadShapes(1, 1, 1, 8, 8, 1, 8)).linear_drift() is not None


def select_variants(names: str | None) -> list[BenchVariant]:
    """Return the variants with these names or labels, e.g. `euler,leapfrog n=7,textbook leapfrog`."""
    variants = all_variants()
    if not names:
        return variants
    selected = []
    for name in (part.strip() for part in names.split(",")):
        matching = [variant for variant in variants if name in (variant.name, variant.label)]
        if not matching:
            raise unknown("variant", name, {variant.label for variant in variants})
        selected += matching
    return selected


class ReferenceCoupling(couplings.Coupling):
    """Runs the reference of another coupling."""

    def __init__(self, coupling: couplings.Coupling) -> None:
        super().__init__(coupling.head_shapes)
        self.coupling = coupling

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.coupling.reference(q, k)

    def reference(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.coupling.reference(q, k)


def build_module(
    variant: BenchVariant, level: Level, shape: BenchShape, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """Build the attention layer, the block or the model of a variant."""
    config = shape.model_config(variant.coupling, variant.scoring, level)
    module: nn.Module
    if level == "attention":
        module = Block(config, 0, device=device, dtype=dtype).attention
    elif level == "block":
        module = Block(config, 0, device=device, dtype=dtype)
    else:
        module = Decoder(config, seed=0, device=device, dtype=dtype)
    if variant.use_reference:
        for layer in attention_layers(module):
            layer.coupling = ReferenceCoupling(layer.coupling)
    if variant.merged:
        merge(module)
    return module


def make_training_step(
    module: nn.Module,
    level: Level,
    shape: BenchShape,
    device: torch.device,
    dtype: torch.dtype,
    loss_fn: LossFn = linear_cross_entropy,
) -> Callable[[], Tensor]:
    """Return a training step: forward and backward; for a whole model also the loss and the optimizer.

    The step returns the loss of a model, or the gradient of the input of a layer.
    """
    generator = torch.Generator().manual_seed(0)
    size = (shape.batch_size, shape.seq_len)
    if level == "model":
        assert isinstance(module, Decoder)
        ids = torch.randint(shape.vocab_size, size, generator=generator).to(device)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

        def model_step() -> Tensor:
            loss = loss_fn(module(ids).flatten(0, 1), module.output_weight, ids.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return model_step
    x = torch.randn(*size, shape.dim, generator=generator).to(device, dtype).requires_grad_()
    grad_output = torch.randn(*size, shape.dim, generator=generator).to(device, dtype)

    def layer_step() -> Tensor:
        module(x).backward(grad_output)
        grad, x.grad = x.grad, None
        for parameter in module.parameters():
            parameter.grad = None
        assert grad is not None
        return grad

    return layer_step


@torch.no_grad()
def share_equal_weights(model: nn.Module, standard: nn.Module) -> None:
    """Make `model` use the memory of `standard` for every parameter that has equal values in both.

    Decoding reads each weight once per token; its place in memory affects the time more than a coupling does.
    """
    standard_parameters = dict(standard.named_parameters())
    for name, parameter in model.named_parameters():
        if name in standard_parameters and torch.equal(parameter, standard_parameters[name]):
            parameter.data = standard_parameters[name].data


def make_decode_step(
    model: Decoder, shape: BenchShape, device: torch.device, packed_weights: PackedWeights | None = None
) -> Callable[[], Tensor]:
    """Return a function that decodes a few tokens after a cached prompt, as `generate` does."""
    model.eval()
    if not CPUDecoder.supports(model):
        model.prepare_for_inference()
    prompt, caches = prefill(model, shape, device)
    step = generate.make_decode_step(
        model, caches, batch_size=1, n_tokens=shape.seq_len, packed_weights=packed_weights
    )
    return decode_greedily(step, prompt, caches, shape)


@torch.inference_mode()
def prefill(
    model: Decoder, shape: BenchShape, device: torch.device
) -> tuple[Tensor, list[KVCache | SlowPathCache]]:
    """Return a random prompt (1, seq_len) and caches that hold it, with space for the decoded tokens."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.vocab_size
    prompt = torch.randint(vocab_size, (1, shape.seq_len), generator=generator).to(device)
    caches = model.new_caches(1, shape.seq_len + shape.decode_tokens)
    model(prompt, caches=caches)
    return prompt, caches


def decode_greedily(
    step: Callable[[Tensor], Tensor],
    prompt: Tensor,
    caches: Sequence[KVCache | SlowPathCache],
    shape: BenchShape,
) -> Callable[[], Tensor]:
    """Return a function that decodes from the end of the prompt and returns the last logits."""

    @torch.inference_mode()
    def decode() -> Tensor:
        for cache in caches:
            cache.crop(shape.seq_len)
        token = prompt[:, -1]
        for _ in range(shape.decode_tokens):
            logits = step(token)
            token = logits.argmax(-1)
        return logits

    return decode


def max_reference_error(variant: BenchVariant, shape: BenchShape) -> float:
    """Return the largest relative float64 error of a layer and its gradients against the reference."""
    small = dataclasses.replace(shape, seq_len=24, batch_size=2)
    module = build_module(variant, "attention", small, torch.device("cpu"), torch.float64)
    assert isinstance(module, Attention)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():  # at init a coupling may be the identity
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    x = torch.randn(2, 24, shape.dim, generator=generator, dtype=torch.float64)
    x = x / shape.dim**0.5
    grad_output = torch.randn(2, 24, shape.dim, generator=generator, dtype=torch.float64)

    def out_and_grads(out: Tensor) -> list[Tensor]:
        grads = torch.autograd.grad(out, list(module.parameters()), grad_output, materialize_grads=True)
        return [out.detach(), *grads]

    fast, textbook = out_and_grads(module(x)), out_and_grads(module.reference(x)[0])
    return max(
        float((a - b).abs().max() / b.abs().max().clamp_min(1.0)) for a, b in zip(fast, textbook, strict=True)
    )


def verify_all(variants: list[BenchVariant], shape: BenchShape, tolerance: float = 1e-10) -> dict[str, float]:
    """Return the error of every variant; raise before anything is timed if one exceeds the tolerance."""
    errors = {}
    for variant in variants:
        error = errors[variant.label] = max_reference_error(variant, shape)
        if not error <= tolerance:
            raise InputError(
                f"variant '{variant.label}' differs from its reference by {error:.1e}, more than "
                f"{tolerance:.0e}: fix it before timing",
                code="reference-mismatch",
            )
    return errors
