"""Our own models in the explorer: a `Decoder`, alone or inside a classifier of the qkflow architecture."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qkflow.attention import Attention
from qkflow.attention.couplings.base import Coupling
from qkflow.data.tokenizer import Tokenizer
from qkflow.explore.base import ExplorableModel, Trajectory
from qkflow.explore.capture import Capture, ForwardPass
from qkflow.measures.attention import capture_attention_inputs
from qkflow.models import Decoder


class DecoderModel(ExplorableModel):
    """A decoder and its tokenizer. The weights are those of `Attention.reference`."""

    kind = "qkflow"

    def __init__(self, name: str, decoder: Decoder, tokenizer: Tokenizer) -> None:
        self.name, self.decoder, self.tokenizer = name, decoder.eval(), tokenizer
        self.layers: list[Attention] = [block.attention for block in decoder.blocks]  # type: ignore[misc]
        self.n_heads = [layer.head_shapes.n_out for layer in self.layers]
        self.vocab_size = min(decoder.config.vocab_size, tokenizer.vocab_size)
        self.signed = any(layer.scoring.name != "softmax" for layer in self.layers)
        self.predicts_tokens = decoder.config.causal
        self.device = decoder.embedding.weight.device

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode_with_bos(text)

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)

    def forward(self, ids: Tensor, off: frozenset[tuple[int, int]]) -> ForwardPass:
        hidden: list[Tensor] = []
        with ExitStack() as stack:
            inputs = stack.enter_context(capture_attention_inputs(self.decoder.blocks))
            stack.enter_context(_capture_residual(self.decoder, hidden))
            for layer, head in off:
                stack.enter_context(zero_head(self.layers[layer], head))
            final = self.decoder.forward(ids[None])[0]
        x = [inputs[layer] for layer in self.layers]
        return ForwardPass(
            weights=(layer.reference(layer_x)[1][0] for layer, layer_x in zip(self.layers, x, strict=True)),
            hidden=hidden,
            final=final,
            inputs=[layer_x[0] for layer_x in x],
        )

    def output_logits(self, final: Tensor) -> Tensor:
        return self.decoder.logits(final)

    def lens_logits(self, capture: Capture, position: int) -> list[tuple[str, Tensor]]:
        states = torch.stack([layer[position] for layer in capture.hidden])
        logits = self.decoder.logits(self.decoder.norm(states))
        return list(zip(lens_names(len(states)), logits, strict=True))

    def coupling(self, layer: int) -> Coupling | None:
        attention = self.layers[layer]
        return None if attention.coupling_spec.name == "none" else attention.coupling

    def trajectory(self, capture: Capture, layer: int, head: int) -> Trajectory:
        attention = self.layers[layer]
        x = capture.inputs[layer][None]
        q, k = attention.qk(x, x)
        shapes = attention.head_shapes
        query_head = head * (shapes.n_q // shapes.n_out)
        return integrate_steps(self.coupling(layer), q, k, query_head, query_head // shapes.group_size)


def lens_names(count: int) -> list[str]:
    return ["embedding", *(f"layer {layer}" for layer in range(count - 1))]


def integrate_steps(coupling: Coupling | None, q: Tensor, k: Tensor, head: int, key_head: int) -> Trajectory:
    """Return one head of q (1, T, H, D) and k (1, T, G, D) before the coupling and after each step."""
    path_q, path_k = [q[0, :, head]], [k[0, :, key_head]]
    if coupling is not None:
        single, steps = coupling, 1
        if isinstance(getattr(coupling, "steps", None), int):
            steps = coupling.steps  # type: ignore[assignment]
            single = copy.copy(coupling)  # shares its parameters
            single.steps = 1  # type: ignore[assignment]
        for _ in range(steps):
            q, k = single.reference(q, k)
            path_q.append(q[0, :, head])
            path_k.append(k[0, :, key_head])
    return Trajectory(torch.stack(path_q), torch.stack(path_k))


@contextmanager
def zero_head(layer: Attention, head: int) -> Iterator[None]:
    """Set the output of one head to zero, before the output projection."""

    def zero(module: nn.Module, arguments: Any, out: Tensor) -> Tensor:
        out = out.clone()
        out[:, :, head] = 0
        return out

    hook = layer.scoring.register_forward_hook(zero)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _capture_residual(decoder: Decoder, hidden: list[Tensor]) -> Iterator[None]:
    """Append the residual stream (T, dim) before the first and after every block."""
    hooks = [
        decoder.blocks[0].register_forward_pre_hook(lambda block, arguments: hidden.append(arguments[0][0]))
    ]
    for block in decoder.blocks:
        hooks.append(block.register_forward_hook(lambda block, arguments, out: hidden.append(out[0])))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
