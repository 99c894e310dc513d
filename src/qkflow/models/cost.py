"""What a model costs, before anything is allocated: parameters, floating-point operations, memory.

Nothing is guessed from a rule of thumb: a model without storage goes through a real training step, and every
matrix product and every tensor kept for the backward pass is counted. So any coupling and any scoring, third
parties' too, is accounted for as it is.
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
from qkflow.models.loss import CHUNK, cross_entropy
from qkflow.roles import parameter_roles


def parameters_by_role(model: nn.Module) -> dict[str, int]:
    """The number of parameters of each role, in the order in which the model has them."""
    counts: dict[str, int] = {}
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    for name, role in parameter_roles(model).items():
        counts[role] = counts.get(role, 0) + sizes[name]
    return counts


def without_storage(config: ModelConfig) -> Decoder:
    """The model as shapes alone."""
    return Decoder(config, device="meta")


def flops_per_token(model: ModelConfig | Decoder, length: int, *, training: bool = True) -> float:
    """Floating-point operations of the matrix products for one token of a window of `length`.

    A multiplication and an addition count as two. Attention counts every pair of tokens, as the field's
    figures do, although a causal kernel may skip half of them. Training is a forward and a backward pass,
    nothing recomputed. Of a config nothing is allocated; a model makes a pass of its own, which is quicker.
    """
    if isinstance(model, ModelConfig):
        model = without_storage(model)
    ids = torch.zeros(1, length, dtype=torch.long, device=model.embedding.weight.device)
    with _CountProducts() as counted, nullcontext() if training else torch.no_grad():
        loss = cross_entropy(model(ids), model.output_weight, ids)
        if training:
            loss.backward()
    model.zero_grad()
    return counted.flops / length


class _CountProducts(TorchDispatchMode):
    """Adds up the operations of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping it would first import it, which takes longer than everything here

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._overloadpacket.__name__
        if name.startswith("_scaled_dot_product_"):
            self.flops += _attention_flops(name, *args)
        # `addmm_`, in place, costs what `addmm` costs
        elif formula := flop_registry.get(getattr(torch.ops.aten, name.rstrip("_"), None)):
            plain = {key: value for key, value in kwargs.items() if key != "out"}
            self.flops += formula(*args, **plain, out_val=out)
        return out


def _attention_flops(name: str, *args: Any) -> int:
    """Of any fused kernel: scores and gathering, and twice that for the backward pass, nothing recomputed."""
    backward = name.removesuffix("_for_cpu").endswith("backward")
    q, k, v = args[1:4] if backward else args[:3]
    batch, heads, length, size = q.shape
    return 2 * batch * heads * length * k.shape[2] * (size + v.shape[3]) * (2 if backward else 1)


@dataclass(frozen=True)
class Memory:
    """Bytes that a training step holds at its fullest."""

    weights: int
    gradients: int
    optimizer: int  # AdamW: two numbers a parameter
    activations: int  # kept by the forward pass for the backward pass
    logits: int  # of one chunk of the loss

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def training_memory(
    config: ModelConfig,
    batch: int,
    length: int,
    *,
    precision: str = "fp32",
    checkpoint_blocks: bool = False,
    chunk: int = CHUNK,
) -> Memory:
    """What a training step on `batch` windows of `length` tokens holds, passing temporaries left out."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    parameters = sum(p.numel() * p.element_size() for p in without_storage(config).parameters())

    def kept(layers: int) -> int:
        model = without_storage(replace(config, layers=layers))
        with FakeTensorMode(allow_non_fake_inputs=True):
            return saved_bytes(model.to_empty(device="cpu"), batch, length, precision)

    if checkpoint_blocks:
        # a block's input for each block, and everything of the one block that is being recomputed
        activations = kept(1) + (config.layers - 1) * batch * length * config.width * 4
    else:
        activations = kept(config.layers)
    logits = min(chunk, batch * length) * config.vocabulary * 4
    return Memory(parameters, parameters, 2 * parameters, activations, logits)


def saved_bytes(model: Decoder, batch: int, length: int, precision: str = "fp32") -> int:
    """Bytes that a forward pass and its loss keep for the backward pass, besides the weights."""
    own = {_storage(p) for p in model.parameters()}
    kept: dict[int, Tensor] = {}  # the tensors stay alive, so that no two storages have one address

    def keep(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in own:
            kept[_storage(tensor)] = tensor
        return tensor

    same: Callable[[Tensor], Tensor] = lambda tensor: tensor  # noqa: E731
    device = next(model.parameters()).device
    ids = torch.zeros(batch, length, dtype=torch.long, device=device)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, same),
        torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"),
    ):
        cross_entropy(model(ids), model.output_weight, ids)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
