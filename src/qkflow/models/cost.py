"""The cost of a model before anything is allocated: parameters and FLOPs. `training.memory` has its memory.

A model on the meta device runs a real training step; every matmul is counted, so third-party couplings and
scorings are counted too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from qkflow.errors import InputError
from qkflow.models.config import ModelConfig
from qkflow.models.decoder import Decoder
from qkflow.roles import parameter_roles
from qkflow.system import total_memory


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


def check_memory(config: ModelConfig) -> None:
    """Raise InputError for a model whose weights alone exceed the memory, before the kernel kills it."""
    size, available = 4 * sum(parameters_by_role(build_meta_decoder(config)).values()), total_memory()
    if size > available:
        raise InputError(
            f"the weights of the model need {size / 1e9:,.0f} GB, this machine has {available / 1e9:,.0f}: "
            "choose smaller sizes",
            code="out-of-memory",
        )


def flops_per_token(model: ModelConfig | Decoder, seq_len: int, *, training: bool = True) -> float:
    """Return the matmul FLOPs for one token of a window of `seq_len`; training adds the backward pass.

    A config is counted on the meta device, without allocation. A model is run as it is, which is faster. All
    layers have the same FLOPs, so one and two layers are counted for a deep config.
    """
    if isinstance(model, ModelConfig) and model.n_layers > 2 and model.slow is None:
        one, two = (flops_per_token(replace(model, n_layers=n), seq_len, training=training) for n in (1, 2))
        return one + (model.n_layers - 1) * (two - one)
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


def hidden_flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Return the FLOPs of a training token without the output layer: a class is read once per example."""
    decoder = build_meta_decoder(config)
    ids = torch.zeros(1, seq_len, dtype=torch.long, device="meta")
    return count_flops(lambda: decoder(ids).sum().backward()) / seq_len


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
