"""The cost of a model before anything is allocated: parameters, FLOPs, memory.

A model on the meta device runs a real training step; every matmul and every tensor saved for the backward
pass is counted, so third-party couplings and scorings are counted too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from qkflow.models.config import ModelConfig
from qkflow.models.decoder import Decoder
from qkflow.models.loss import CHUNK_SIZE
from qkflow.roles import parameter_roles


def parameters_by_role(model: nn.Module) -> dict[str, int]:
    """Return the number of parameters of each role, in model order."""
    counts: dict[str, int] = {}
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    for name, role in parameter_roles(model).items():
        counts[role] = counts.get(role, 0) + sizes[name]
    return counts


def build_meta_decoder(config: ModelConfig) -> Decoder:
    """Return a decoder without storage."""
    return Decoder(config, device="meta")


def flops_per_token(model: ModelConfig | Decoder, seq_len: int, *, training: bool = True) -> float:
    """Return the matmul FLOPs for one token of a window of `seq_len`; training adds the backward pass.

    A config is counted on the meta device, without allocation. A model is run as it is, which is faster.
    """
    decoder = build_meta_decoder(model) if isinstance(model, ModelConfig) else model
    ids = torch.zeros(1, seq_len, dtype=torch.long, device=decoder.embedding.weight.device)

    def step() -> None:
        with nullcontext() if training else torch.no_grad():
            loss = decoder.loss(decoder(ids), ids)
            if training:
                loss.backward()

    flops = count_flops(step)
    decoder.zero_grad()
    return flops / seq_len


def count_flops(fn: Callable[[], object]) -> int:
    """Return the FLOPs of all matmuls and attention kernels that `fn` runs, backward pass included.

    A multiply-add counts as two. Attention counts every pair of tokens, although a causal kernel may skip
    half of them; recomputation in its backward kernel is not counted.
    """
    with _MatmulFlopCounter() as counter:
        fn()
    return counter.flops


class _MatmulFlopCounter(TorchDispatchMode):
    """Sums the FLOPs of all matmuls."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import dynamo, which takes seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._overloadpacket.__name__
        if name.startswith("_scaled_dot_product_"):
            self.flops += _attention_flops(name, *args)
        elif name in ("mv", "addmv", "addmv_"):
            self.flops += 2 * args[-2 if name == "mv" else 1].numel()
        # `addmm_`, in place, costs as much as `addmm`
        elif formula := flop_registry.get(getattr(torch.ops.aten, name.rstrip("_"), None)):
            options = {key: value for key, value in kwargs.items() if key != "out"}
            self.flops += formula(*args, **options, out_val=out)
        return out


def _attention_flops(name: str, *args: Any) -> int:
    """Return the FLOPs of a fused attention kernel; its backward pass counts twice, without recomputation."""
    backward = name.removesuffix("_for_cpu").endswith("backward")
    q, k, v = args[1:4] if backward else args[:3]
    batch, heads, length, head_dim = q.shape
    return 2 * batch * heads * length * k.shape[2] * (head_dim + v.shape[3]) * (2 if backward else 1)


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak bytes of a training step."""

    weights: int
    gradients: int
    optimizer: int  # AdamW: two values per parameter
    activations: int  # saved for the backward pass
    logits: int  # of one chunk of the loss

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def estimate_training_memory(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    *,
    precision: str = "fp32",
    activation_checkpointing: bool = False,
    chunk_size: int = CHUNK_SIZE,
) -> MemoryEstimate:
    """Estimate the memory of a training step on `batch_size` windows of `seq_len`, without temporaries."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    parameters = sum(p.numel() * p.element_size() for p in build_meta_decoder(config).parameters())

    def saved(n_layers: int) -> int:
        model = build_meta_decoder(replace(config, n_layers=n_layers))
        with FakeTensorMode(allow_non_fake_inputs=True):
            return saved_activation_bytes(model.to_empty(device="cpu"), batch_size, seq_len, precision)

    if activation_checkpointing:
        # the input of each block, and all activations of the one block that is being recomputed
        activations = saved(1) + (config.n_layers - 1) * batch_size * seq_len * config.dim * 4
    else:
        activations = saved(config.n_layers)
    logits = min(chunk_size, batch_size * seq_len) * config.vocab_size * 4
    return MemoryEstimate(parameters, parameters, 2 * parameters, activations, logits)


def saved_activation_bytes(model: Decoder, batch_size: int, seq_len: int, precision: str = "fp32") -> int:
    """Return the bytes that a forward pass and its loss save for the backward pass, without weights."""
    weights = {_storage_id(p) for p in model.parameters()}
    saved: dict[int, Tensor] = {}  # holds the tensors, so that no storage address is reused

    def pack(tensor: Tensor) -> Tensor:
        if _storage_id(tensor) not in weights:
            saved[_storage_id(tensor)] = tensor
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    device = next(model.parameters()).device
    ids = torch.zeros(batch_size, seq_len, dtype=torch.long, device=device)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, unpack),
        torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"),
    ):
        model.loss(model(ids), ids)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def _storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
