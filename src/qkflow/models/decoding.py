"""One sequence, one token at a time, on a processor: every weight is read once, and little else counts.

The model's own forward pass is made for many tokens. For one, its products are matrix times vector, which run
at the speed of memory, and only if the matrix lies in memory the way the kernel likes; and its many small
operations cost more than their arithmetic. So the weights are laid out anew, once: queries, keys and values
as one matrix, gate and up as another. Of a norm one number is left, which scales the product that follows.
Coupling, scoring and cache are the model's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from qkflow.attention import Attention, KVCache
from qkflow.attention.circuits import FactorisedOV, FactorisedQK
from qkflow.attention.couplings.at_rest import AtRest, for_products
from qkflow.attention.masks import Mask
from qkflow.attention.rotary import Rotation, rotate_reference
from qkflow.models.decoder import Block, Decoder
from qkflow.timescale.cache import SlowCache


class TokenByToken:
    """Decodes a single sequence from caches that the model has filled."""

    def __init__(self, model: Decoder, caches: Sequence[KVCache | SlowCache]) -> None:
        assert self.suits(model)
        self.model = model
        self.caches = [cache for cache in caches if isinstance(cache, KVCache)]
        self.layers = [_Layer.of(block, model.config.norm_eps) for block in model.blocks]  # type: ignore[arg-type]
        self.eps = model.config.norm_eps
        self.output = for_products(model.output_weight)
        first: Attention = model.blocks[0].attention  # type: ignore[assignment]
        capacity = self.caches[0].capacity
        self.rotations = first.rotation_for(
            model.embedding.weight.expand(capacity, -1, -1).transpose(0, 1)[:1]
        )

    @staticmethod
    def suits(model: Decoder) -> bool:
        """Whether this way of decoding knows the model's parts and pays on its device."""
        weight = model.embedding.weight
        plain = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.float64)
        blocks: list[Block] = list(model.blocks)  # type: ignore[arg-type]
        return (
            plain
            and model.slow is None
            and all(
                isinstance(block.attention.qk, FactorisedQK)
                and isinstance(block.attention.ov, FactorisedOV)
                and block.attention.qk.q.bias is None
                for block in blocks
            )
        )

    def logits(self, token: int) -> Tensor:
        """Logits (V,) of what follows `token`, which is read into the caches."""
        x = self.model.embedding.weight[token]
        position = self.caches[0].length
        rotation = None
        if self.rotations is not None:
            cos, sin = self.rotations
            rotation = cos[position : position + 1], sin[position : position + 1]
        for layer, cache in zip(self.layers, self.caches, strict=True):
            x = layer.forward(x, rotation, cache)
        return torch.mv(self.output, x * self.model.norm.weight).mul_(_scale(x, self.eps))


@dataclass
class _Layer:
    """A block with its weights laid out for one token."""

    attention: Attention
    at_rest: AtRest | None
    norm: Tensor
    qkv: Tensor
    bias: Tensor | None
    o: Tensor
    feed_forward_norm: Tensor
    into: Tensor  # gate above up, or up alone
    gated: bool
    down: Tensor
    eps: float

    @classmethod
    def of(cls, block: Block, eps: float) -> _Layer:
        attention, ff = block.attention, block.feed_forward
        qk, ov = attention.qk, attention.ov
        assert isinstance(qk, FactorisedQK)
        assert isinstance(ov, FactorisedOV)
        at_rest = attention.coupling.at_rest(qk) if qk.plain else None
        queries_and_keys = [qk.q.weight, qk.k.weight] if at_rest is None else [at_rest.projection]
        into = ff.up.weight if ff.gate is None else torch.cat([ff.gate.weight, ff.up.weight])
        return cls(
            attention,
            at_rest,
            block.attention_norm.weight,
            for_products(torch.cat([*queries_and_keys, ov.v.weight])),
            None if at_rest is None else at_rest.bias,
            for_products(ov.o.weight),
            block.feed_forward_norm.weight,
            for_products(into),
            ff.gate is not None,
            for_products(ff.down.weight),
            eps,
        )

    def forward(self, x: Tensor, rotation: Rotation | None, cache: KVCache) -> Tensor:
        x = torch.addmv(x, self.o, self._attend(x, rotation, cache))
        inner = torch.mv(self.into, x * self.feed_forward_norm).mul_(_scale(x, self.eps))
        if self.gated:
            gate, up = inner.chunk(2)
            inner = F.silu(gate).mul_(up)
        else:
            inner = F.gelu(inner)
        return torch.addmv(x, self.down, inner)

    def _attend(self, x: Tensor, rotation: Rotation | None, cache: KVCache) -> Tensor:
        attention, heads = self.attention, self.attention.heads
        x = (x * self.norm).mul_(_scale(x, self.eps))
        last = heads.values * heads.value_size
        wide = torch.mv(self.qkv, x)
        q, k = self._couple(wide[:-last])
        v = wide[-last:].view(1, 1, heads.values, heads.value_size)
        if attention.q_norm is not None and attention.k_norm is not None:
            q, k = attention.q_norm(q), attention.k_norm(k)
        if rotation is not None:
            q, k = rotate_reference(torch.cat([q, k], dim=2), rotation).split(
                (heads.queries, heads.keys), dim=2
            )
        keys, values = cache.append(k, v)
        length = keys.shape[1]
        mask = Mask() if attention.window is None else attention.mask_for(1, length, device=x.device)
        x = x.view(1, 1, -1)
        out = attention.scoring(q, keys, values, mask=mask, scale=attention.scale, dropout=0.0, x=x)
        gathered: Tensor = out.reshape(-1)
        return gathered

    def _couple(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """(1, 1, H, D) and (1, 1, G, D) from what the projection yields."""
        heads = self.attention.heads
        if self.at_rest is not None:
            if self.bias is not None:
                projected += self.bias
            q, k = self.at_rest.finish(projected[None])
            return q.view(1, 1, -1, heads.size), k.view(1, 1, -1, heads.size)
        q, k = projected.split((heads.queries * heads.size, heads.keys * heads.size))
        coupled: tuple[Tensor, Tensor] = self.attention.coupling(
            q.view(1, 1, heads.queries, heads.size), k.view(1, 1, heads.keys, heads.size)
        )
        return coupled


def _scale(x: Tensor, eps: float) -> float:
    """What RMSNorm multiplies x with, its weight aside."""
    return 1 / math.sqrt(torch.dot(x, x).item() / len(x) + eps)
