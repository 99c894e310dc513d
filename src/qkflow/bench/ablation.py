"""Ablations: every second implementation, timed against the plain one.

A second implementation (custom autograd function, packed weights, cache) stays only if it makes what a user
runs (block step, model step, generation, preparing a corpus) at least 5% faster, or halves its memory.
`ABLATIONS` lists all of them. Both implementations must agree before they are timed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from qkflow.attention import couplings
from qkflow.attention.attention import attention_layers
from qkflow.attention.scorings import paired
from qkflow.bench.levels import synchronized
from qkflow.bench.memory import peak_memory_bytes
from qkflow.bench.timing import Clock, TimedFn, TimeRatio, time_interleaved
from qkflow.bench.variants import (
    BenchShape,
    BenchVariant,
    LossFn,
    build_module,
    decode_greedily,
    make_training_step,
    prefill,
    share_equal_weights,
)
from qkflow.errors import unknown
from qkflow.models import Decoder
from qkflow.models.cpu_decoder import CPUDecoder, PackedWeights
from qkflow.models.loss import CHUNK_SIZE, linear_cross_entropy, linear_cross_entropy_reference

MIN_SPEEDUP, MIN_MEMORY_RATIO = 1.05, 2.0  # plain / ours: enough of either keeps an implementation
BATCH_SIZE = 2  # of the model step with a large vocabulary
FP32 = torch.float32


@dataclass(frozen=True)
class Setup:
    """Sizes and device of all ablations."""

    shape: BenchShape
    device: torch.device


@dataclass(frozen=True)
class Ablation:
    """A second implementation and a case that it should speed up; `build` returns (ours, plain)."""

    name: str
    case: str
    build: Callable[[Setup], tuple[TimedFn, TimedFn]]
    round_multiplier: int = 1
    cpu_only: bool = False
    uses_torch_memory: bool = True  # of this process; other memory is not measured


@dataclass(frozen=True)
class AblationRow:
    """Time and memory of the plain implementation relative to ours: above 1, ours is better."""

    name: str
    case: str
    time: TimeRatio
    memory_ratio: float | None

    @property
    def verdict(self) -> str:
        """`keep` if this case is enough to keep the implementation, else `delete`."""
        smaller = self.memory_ratio is not None and self.memory_ratio >= MIN_MEMORY_RATIO
        return "keep" if self.time.ratio >= MIN_SPEEDUP or smaller else "delete"

    def to_dict(self) -> dict[str, Any]:
        memory = None if self.memory_ratio is None else round(self.memory_ratio, 4)
        return {
            "name": self.name,
            "case": self.case,
            **self.time.rounded(),
            "rounds": self.time.rounds,
            "memory_ratio": memory,
            "verdict": self.verdict,
        }


def select_ablations(names: str | None, device: torch.device) -> list[Ablation]:
    """Return the ablations with these comma-separated names (default: all) that `device` supports."""
    selected = list(ABLATIONS)
    if names:
        parts = [part.strip() for part in names.split(",")]
        known = {ablation.name for ablation in ABLATIONS}
        for part in parts:
            if part not in known:
                raise unknown("ablation", part, known)
        selected = [ablation for ablation in selected if ablation.name in parts]
    return [ablation for ablation in selected if device.type == "cpu" or not ablation.cpu_only]


def run_ablation(
    ablation: Ablation,
    setup: Setup,
    rounds: int,
    clock: Clock = time.perf_counter,
    on_round: Callable[[], None] | None = None,
) -> AblationRow:
    """Time both implementations, interleaved in one process, after a check that they agree."""
    torch.manual_seed(0)
    ours, plain = (synchronized(fn, setup.device) for fn in ablation.build(setup))
    torch.testing.assert_close(ours(), plain(), rtol=1e-3, atol=1e-4)
    rounds *= ablation.round_multiplier
    times = time_interleaved(ours, {"plain": plain}, rounds=rounds, clock=clock, warmup=2, on_round=on_round)
    memory = None
    if ablation.uses_torch_memory:
        memory = peak_memory_bytes(plain, setup.device) / max(1, peak_memory_bytes(ours, setup.device))
    return AblationRow(ablation.name, ablation.case, times["plain"], memory)


def _softmax_difference(setup: Setup) -> tuple[TimedFn, TimedFn]:
    variant = BenchVariant("differential_v2", scoring="differential_v2")
    block = build_module(variant, "block", setup.shape, setup.device, FP32)
    ours = make_training_step(block, "block", setup.shape, setup.device, FP32)

    def plain() -> Tensor:
        with mock.patch.object(paired, "supports", return_value=False):
            return ours()

    return ours, plain


def _build_decoder(setup: Setup, coupling: str) -> Decoder:
    model = build_module(BenchVariant(coupling, coupling), "decode", setup.shape, setup.device, FP32)
    assert isinstance(model, Decoder)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in attention_layers(model):
            for parameter in layer.coupling.parameters():  # at init a coupling may be the identity
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.05 * noise.to(parameter.device))
    return model.eval()


def _decode_packed(model: Decoder, setup: Setup, packed_weights: PackedWeights) -> TimedFn:
    prompt, caches = prefill(model, setup.shape, setup.device)
    with torch.inference_mode():
        decoder = CPUDecoder(model, caches, packed_weights)
    return decode_greedily(lambda token: decoder.logits(int(token))[None], prompt, caches, setup.shape)


def _decode_regular(model: Decoder, setup: Setup) -> TimedFn:
    prompt, caches = prefill(model, setup.shape, setup.device)

    def step(token: Tensor) -> Tensor:
        return model.logits(model(token[:, None], caches=caches)[:, -1])

    return decode_greedily(step, prompt, caches, setup.shape)


def _packed_decoding(coupling: str, setup: Setup) -> tuple[TimedFn, TimedFn]:
    model = _build_decoder(setup, coupling)
    ours = _decode_packed(model, setup, PackedWeights())
    return ours, _decode_regular(model.prepare_for_inference(), setup)


def _coupling_preparation(coupling: str, setup: Setup) -> tuple[TimedFn, TimedFn]:
    """Build packed decoding with the preparation of this coupling, and with the default of `Coupling`."""
    model, packed_weights = _build_decoder(setup, coupling), PackedWeights()
    ours = _decode_packed(model, setup, packed_weights)
    for layer in attention_layers(model):
        default = partial(couplings.Coupling.prepare_for_inference, layer.coupling)
        layer.coupling.prepare_for_inference = default  # type: ignore[method-assign]
    return ours, _decode_packed(model, setup, packed_weights)


def _preparation(coupling: str, setup: Setup) -> tuple[TimedFn, TimedFn]:
    """Build decoding without packed weights, with prepared and with regular attention layers."""
    model, other = _build_decoder(setup, coupling), _build_decoder(setup, coupling)
    share_equal_weights(other, model)
    return _decode_regular(model.prepare_for_inference(), setup), _decode_regular(other, setup)


def _model_step(setup: Setup, loss_fn: LossFn) -> TimedFn:
    vocab_size = setup.shape.decode_vocab_size
    shape = BenchShape(
        setup.shape.dim,
        setup.shape.n_heads,
        seq_len=setup.shape.seq_len,
        batch_size=min(BATCH_SIZE, setup.shape.batch_size),
        vocab_size=vocab_size,
    )
    model = build_module(BenchVariant("none"), "model", shape, setup.device, FP32)
    return make_training_step(model, "model", shape, setup.device, FP32, loss_fn)


def _chunked_loss(setup: Setup) -> tuple[TimedFn, TimedFn]:
    return _model_step(setup, linear_cross_entropy), _model_step(setup, linear_cross_entropy_reference)


def _torch_chunked_loss(setup: Setup) -> tuple[TimedFn, TimedFn]:
    # our chunk size: with PyTorch's default the same step took 2.7 times as long
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK_SIZE)

    def torch_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = F.linear_cross_entropy(hidden, weight, targets, options=options)
        return loss

    return _model_step(setup, linear_cross_entropy), _model_step(setup, torch_loss)


def _bpe_cache(setup: Setup) -> tuple[TimedFn, TimedFn]:
    """Tokenize the built-in corpus into token files, each time with a new tokenizer."""
    from qkflow.data import corpora, splits, tokenizer
    from qkflow.data.bpe_cache import use_bpe_cache
    from qkflow.data.pipeline import tokenize_corpus
    from qkflow.data.readers.files import ReadProgress
    from qkflow.data.token_set import TokenSetWriter

    source = corpora.resolve("speeches")
    documents = splits.assign_splits(source.iter_documents(ReadProgress()), source.name)
    trained = tokenizer.train_bpe((document.text for document in documents), 8192)

    def tokenize(cached: bool) -> int:
        fresh = tokenizer.tokenizer_from_str(trained.to_str(), trained.eos_token_id)
        with (
            use_bpe_cache(cached),
            tempfile.TemporaryDirectory() as folder,
            TokenSetWriter(Path(folder), fresh) as writer,
        ):
            tokenize_corpus(source, fresh, writer, ReadProgress())
            writer.finalize({"name": source.name}, "bpe:8192")
            return sum(path.stat().st_size for path in Path(folder).rglob("*.bin"))

    return lambda: tokenize(True), lambda: tokenize(False)


_FIRST_STEP = """
import torch
from qkflow.models import Decoder, preset
from qkflow.training.optimizer import AdamW, parameter_groups
model = Decoder(preset("tiny", vocab_size=64), seed=0)
model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
optimizer = {optimizer}
optimizer.step()
"""


def _optimizer_start(setup: Setup) -> tuple[TimedFn, TimedFn]:
    """Run a new process up to its first optimizer step; `torch.optim.AdamW` imports the compiler."""

    def run(optimizer: str) -> None:
        code = _FIRST_STEP.format(optimizer=optimizer)
        subprocess.run([sys.executable, "-c", code], check=True)

    ours, plain = "AdamW(parameter_groups(model, 1e-3))", "torch.optim.AdamW(model.parameters(), fused=True)"
    return lambda: run(ours), lambda: run(plain)


def _all_ablations() -> Iterator[Ablation]:
    yield Ablation(
        "blocked softmax difference", "block step, differential_v2", _softmax_difference, cpu_only=True
    )
    for coupling in ("none", "euler", "affine"):
        case, build = f"generation, {coupling}", partial(_packed_decoding, coupling)
        yield Ablation("packed CPU decoding", case, build, 8, cpu_only=True)
    for coupling in ("euler", "leapfrog:n=7", "affine"):
        case, build = f"generation, {coupling}", partial(_coupling_preparation, coupling)
        yield Ablation("coupling's own inference preparation", case, build, 8, cpu_only=True)
    for coupling in ("none", "drift", "euler", "leapfrog:n=7"):
        case, build = f"generation with unpacked weights, {coupling}", partial(_preparation, coupling)
        yield Ablation("prepared attention layers", case, build, 8)
    yield Ablation("chunked loss", "model step, batch size 2, vocabulary of 50,257", _chunked_loss)
    if hasattr(F, "linear_cross_entropy"):
        case = "model step, batch size 2, vocabulary of 50,257, against PyTorch's chunked loss"
        yield Ablation("chunked loss", case, _torch_chunked_loss)
    case = "tokenize the built-in corpus"
    yield Ablation("BPE word cache", case, _bpe_cache, cpu_only=True, uses_torch_memory=False)
    case = "new process up to the first step"
    yield Ablation("AdamW without torch.optim", case, _optimizer_start, uses_torch_memory=False)


ABLATIONS = tuple(_all_ablations())
