"""Memory of a training step before anything is allocated.

A step runs on fake tensors, which have shapes and no data. Every allocation and release is recorded, so
couplings, scorings, optimizers and precisions are counted as they are, third-party ones included. The kernels
are those of a CPU; a GPU allocates the same tensors, and library buffers on top.

Memory is linear in the number of layers and, for large batches, in the batch size. A deep model is therefore
replayed with two and four layers, and a large batch with two smaller ones; the optimizer step is replayed
in full.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qkflow.models.config import ModelConfig
from qkflow.models.cost import build_meta_decoder
from qkflow.models.decoder import Decoder
from qkflow.models.loss import CHUNK_SIZE
from qkflow.training.config import OptimizerName, Precision
from qkflow.training.muon import Muon, hidden_matrices
from qkflow.training.optimizer import parameter_groups

MAX_REPLAYED_LAYERS = 8  # a deeper model is extrapolated from REPLAYED_LAYERS
REPLAYED_LAYERS = (2, 4)
REPLAYED_TOKENS = 4 * CHUNK_SIZE  # of the smaller batch: the phase that decides the peak is settled there
KINDS = ("weights", "gradients", "optimizer", "activations", "temporary")


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a training step on one device: the most of each kind, and the most of all together.

    The kinds do not peak at the same time, so `peak` is below their sum. `working` is the peak of everything
    but weights, gradients and optimizer state.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int  # saved for the backward pass
    logits: int  # of one chunk of the loss
    temporary: int
    working: int
    peak: int


@dataclass(frozen=True)
class _BackwardPeaks:
    """Peaks of forward and backward pass: activations, working memory, working memory and gradients."""

    activations: int
    working: int
    with_gradients: int

    def extrapolate(self, other: _BackwardPeaks, share: float) -> _BackwardPeaks:
        """Return the peaks at `share` of the way from these to the other ones, or beyond."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return _BackwardPeaks(*(max(0, round(a + share * (b - a))) for a, b in pairs))


@dataclass(frozen=True)
class _OptimizerPeaks:
    """Bytes of the state of training, and the temporaries of the optimizer step."""

    weights: int
    gradients: int
    optimizer: int
    temporary: int


@dataclass(frozen=True)
class MemoryModel:
    """Memory of a training step of one model, for any batch size."""

    config: ModelConfig
    seq_len: int
    optimizer: OptimizerName = "adamw"
    precision: Precision = "fp32"
    activation_checkpointing: bool = False

    def at(self, batch_size: int) -> StepMemory:
        """Return the memory of a step on `batch_size` windows, on one device."""
        peaks, state = self._backward_peaks(batch_size), _optimizer_peaks(self._key, self.optimizer)
        itemsize = 2 if self.precision == "bf16" else 4
        logits = min(CHUNK_SIZE, batch_size * self.seq_len) * self.config.vocab_size * itemsize
        working = max(peaks.working, state.temporary)
        forward_backward = state.weights + state.optimizer + peaks.with_gradients
        update = state.weights + state.optimizer + state.gradients + state.temporary
        return StepMemory(
            state.weights,
            state.gradients,
            state.optimizer,
            peaks.activations,
            logits,
            max(0, working - peaks.activations - logits),
            working,
            max(forward_backward, update),
        )

    @property
    def first_extrapolated_batch(self) -> int:
        """The batch size above which nothing is replayed for each batch size of its own."""
        return -(-REPLAYED_TOKENS // self.seq_len)

    def _backward_peaks(self, batch_size: int) -> _BackwardPeaks:
        options = (self._key, self.seq_len, self.precision, self.activation_checkpointing)
        first = self.first_extrapolated_batch
        if batch_size <= first:
            return _backward_peaks(batch_size, *options)
        low, high = (_backward_peaks(size, *options) for size in (first, 2 * first))
        return low.extrapolate(high, (batch_size - first) / first)

    @property
    def _key(self) -> str:
        """The config without its init, which does not change the memory."""
        return json.dumps(replace(self.config, init="gpt2").to_dict(), sort_keys=True)


def estimate_training_memory(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    *,
    optimizer: OptimizerName = "adamw",
    precision: Precision = "fp32",
    activation_checkpointing: bool = False,
) -> StepMemory:
    """Return the memory of a training step on `batch_size` windows of `seq_len` tokens, on one device."""
    return MemoryModel(config, seq_len, optimizer, precision, activation_checkpointing).at(batch_size)


@functools.lru_cache(maxsize=256)
def _backward_peaks(
    batch_size: int, key: str, seq_len: int, precision: Precision, checkpointing: bool
) -> _BackwardPeaks:
    config = ModelConfig.from_dict(json.loads(key))

    def replay(n_layers: int) -> _BackwardPeaks:
        model = replace(config, n_layers=n_layers)
        return _replay_backward(model, batch_size, seq_len, precision, checkpointing)

    few, more = REPLAYED_LAYERS
    if (
        config.n_layers <= MAX_REPLAYED_LAYERS or config.slow is not None
    ):  # a slow path may refer to layers by index
        return replay(config.n_layers)
    return replay(few).extrapolate(replay(more), (config.n_layers - few) / (more - few))


def _replay_backward(
    config: ModelConfig, batch_size: int, seq_len: int, precision: Precision, checkpointing: bool
) -> _BackwardPeaks:
    """Run forward and backward pass of one step on fake tensors."""

    def run(model: Decoder, record: _AllocationRecorder) -> None:
        model.activation_checkpointing = checkpointing
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: record.move(p.grad, "gradients"))
        ids = torch.zeros(batch_size, seq_len, dtype=torch.long)
        with (
            torch.autograd.graph.saved_tensors_hooks(record.save_activation, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
        ):
            loss = model.loss(model(ids), ids)
        loss.backward()

    record = _replay(config, run)
    return _BackwardPeaks(
        record.peaks["activations"], record.working_peak, record.peak - record.peaks["weights"]
    )


@functools.lru_cache(maxsize=256)
def _optimizer_peaks(key: str, optimizer: OptimizerName) -> _OptimizerPeaks:
    """Return the state of training. The update of Muon runs on fake tensors; AdamW's has no temporaries."""
    config = ModelConfig.from_dict(json.loads(key))
    if optimizer == "adamw":
        size = sum(p.numel() * p.element_size() for p in build_meta_decoder(config).parameters())
        return _OptimizerPeaks(size, size, 2 * size, 0)

    def run(model: Decoder, record: _AllocationRecorder) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
            record.move(parameter.grad, "gradients")
        updater = Muon(parameter_groups(model, 1e-3, 0.1), hidden_matrices(model))
        for tensor in updater.state_dict().values():
            record.move(tensor, "optimizer")
        record.reset_peaks()
        updater.step()

    record = _replay(config, run)
    peaks = record.peaks
    return _OptimizerPeaks(peaks["weights"], peaks["gradients"], peaks["optimizer"], record.working_peak)


def _replay(config: ModelConfig, run: Callable[[Decoder, _AllocationRecorder], None]) -> _AllocationRecorder:
    from torch._subclasses.fake_tensor import FakeTensorMode

    meta = build_meta_decoder(config)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = meta.to_empty(device="cpu")
        with _AllocationRecorder() as record:
            for parameter in model.parameters():
                record.move(parameter, "weights")
            run(model, record)
    return record


class _AllocationRecorder(TorchDispatchMode):
    """Records the bytes of all live tensors by kind. A new tensor is `temporary` until it is moved."""

    def __init__(self) -> None:
        super().__init__()
        self.now = dict.fromkeys(KINDS, 0)
        self.peaks = dict.fromkeys(KINDS, 0)
        self.peak = self.working_peak = 0
        self._live: dict[int, tuple[str, int]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import dynamo, which takes seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor):
                self._add(value)
        return out

    def save_activation(self, tensor: Tensor) -> Tensor:
        self._add(tensor)
        if self._live[_storage_id(tensor)][0] == "temporary":
            self.move(tensor, "activations")
        return tensor

    def move(self, tensor: Tensor | None, kind: str) -> None:
        """Count a tensor as another kind from now on."""
        assert tensor is not None
        self._add(tensor)
        before, size = self._live[_storage_id(tensor)]
        self._live[_storage_id(tensor)] = (kind, size)
        self.now[before] -= size
        self.now[kind] += size
        self._update_peaks()

    def reset_peaks(self) -> None:
        self.peak = self.working_peak = 0
        self._update_peaks()

    def _add(self, tensor: Tensor) -> None:
        key = _storage_id(tensor)
        if key in self._live:
            return
        storage = tensor.untyped_storage()
        self._live[key] = ("temporary", storage.nbytes())
        self.now["temporary"] += storage.nbytes()
        self._update_peaks()
        weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        kind, size = self._live.pop(key)
        self.now[kind] -= size

    def _update_peaks(self) -> None:
        for kind, size in self.now.items():
            self.peaks[kind] = max(self.peaks[kind], size)
        self.peak = max(self.peak, sum(self.now.values()))
        self.working_peak = max(self.working_peak, self.now["activations"] + self.now["temporary"])


def _storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
