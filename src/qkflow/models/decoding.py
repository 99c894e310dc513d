"""One sequence, one token at a time, on a processor: every weight is read once, and little else counts.

The model's own forward pass is made for many tokens. For one, its products are matrix times vector, which run
at the speed of memory, and only if the matrix lies in memory the way the kernel likes; and its many small
operations cost more than their arithmetic. So the weights are laid out anew, once: queries, keys and values
as one matrix, gate and up as another. Of a norm one number is left, which scales the product that follows.
Coupling, scoring and cache are the model's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkflow.attention import KVCache
from qkflow.attention.couplings.at_rest import AsEver, for_products, plain
from qkflow.attention.masks import Mask
from qkflow.attention.projections import FactorisedOV, FactorisedQK, untouched, unwatched
from qkflow.attention.rope import Rotation, rotate_
from qkflow.models.decoder import Block, Decoder
from qkflow.models.slow_path.cache import SlowCache


class Layouts:
    """Matrices laid out for one token, each once: decoders that are given the same share their memory."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], tuple[tuple[Tensor, ...], Tensor]] = {}

    def __call__(self, *weights: Tensor) -> Tensor:
        """These weights, one below the other."""
        places = tuple(weight.data_ptr() for weight in weights)
        if places not in self._made:  # the weights are kept too, so that no other ever lies in their place
            self._made[places] = weights, for_products(torch.cat(weights) if weights[1:] else weights[0])
        return self._made[places][1]


class TokenByToken:
    """Decodes a single sequence from caches that the model has filled."""

    def __init__(
        self, model: Decoder, caches: Sequence[KVCache | SlowCache], layouts: Layouts | None = None
    ) -> None:
        assert self.suits(model)
        self.model = model
        self.eps = model.config.norm_eps
        self.caches = [cache for cache in caches if isinstance(cache, KVCache)]
        lay_out = layouts or Layouts()
        self.path = _Path(model.blocks, self.caches[0].capacity, self.eps, lay_out)
        self.output = lay_out(model.output_weight)
        if model.slow is not None:
            assert isinstance(caches[-1], SlowCache)
            self.slow_cache = caches[-1]
            capacity = self.slow_cache.layers[0].capacity
            self.slow_path = _Path(model.slow.blocks, capacity, self.eps, lay_out)

    @staticmethod
    def suits(model: Decoder) -> bool:
        """Whether this way of decoding knows the model's parts, as we made them, and pays here."""
        weight = model.embedding.weight
        blocks = [*model.blocks, *(model.slow.blocks if model.slow is not None else [])]
        return (
            weight.device.type == "cpu"
            and weight.dtype in (torch.float32, torch.float64)
            and all(_known(block) for block in blocks)
            and (model.head is None or untouched(model.head))
            and all(unwatched(module) for module in model.modules())
        )

    def logits(self, token: int) -> Tensor:
        """Logits (V,) of what follows `token`, which is read into the caches."""
        x = self.model.embedding.weight[token]
        x = self.path(x, self.caches, self._injection(x))
        return torch.mv(self.output, x * self.model.norm.weight).mul_(_scale(x, self.eps))

    def _injection(self, x: Tensor) -> Callable[[Tensor, int], Tensor] | None:
        """What the slow path adds before each layer; its layers run when x completes a block."""
        slow = self.model.slow
        if slow is None:
            return None
        mean = self.slow_cache.push(x.view(1, 1, -1))
        if mean.shape[1]:
            y = self.slow_path(mean.view(-1), self.slow_cache.layers)
            self.slow_cache.keep(slow.phi(y.view(1, 1, -1)))
        heard = self.slow_cache.heard(1).view(-1)
        return lambda x, layer: slow.inject(x, heard, layer)


def _known(block: nn.Module) -> bool:
    if type(block) is not Block:
        return False
    qk, ov, ff = block.attention.qk, block.attention.ov, block.feed_forward
    if not (isinstance(qk, FactorisedQK) and isinstance(ov, FactorisedOV)):
        return False
    used = [ov.v, ov.o, ff.up, ff.down, *([] if ff.gate is None else [ff.gate])]
    return qk.plain and qk.q.bias is None and all(untouched(layer) for layer in used)


class _Path:
    """Blocks that a token passes one after the other."""

    def __init__(self, blocks: nn.ModuleList, capacity: int, eps: float, lay_out: Layouts) -> None:
        self.layers = [_Layer(block, eps, lay_out) for block in blocks]  # type: ignore[arg-type]
        first = self.layers[0].attention
        self.rotations = first.rotation_for(self.layers[0].norm.expand(1, capacity, -1))

    def __call__(
        self, x: Tensor, caches: list[KVCache], inject: Callable[[Tensor, int], Tensor] | None = None
    ) -> Tensor:
        position = caches[0].length
        rotation = None
        if self.rotations is not None:
            cos, sin = self.rotations
            rotation = cos[position], sin[position]
        for number, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            if inject is not None:
                x = inject(x, number)
            x = layer.forward(x, rotation, cache)
        return x


class _Layer:
    """A block with its weights laid out for one token, and places for what is made of it.

    Results go to the same memory at every token, so that all views of it are made once: cutting tensors takes
    as long as computing with ones as small as these.
    """

    def __init__(self, block: Block, eps: float, lay_out: Layouts) -> None:
        attention, ff = block.attention, block.feed_forward
        qk, ov, heads = attention.qk, attention.ov, attention.heads
        assert isinstance(qk, FactorisedQK)
        assert isinstance(ov, FactorisedOV)
        at_rest = attention.coupling.at_rest(qk) or AsEver(*plain(qk), attention.coupling)
        at_rest = at_rest.with_values(ov.v)
        self.attention, self.eps = attention, eps
        self.norm, self.feed_forward_norm = block.attention_norm.weight, block.feed_forward_norm.weight
        self.o, self.down = lay_out(ov.o.weight), lay_out(ff.down.weight)
        self.gated = ff.gate is not None
        self.into = lay_out(ff.gate.weight, ff.up.weight) if ff.gate else lay_out(ff.up.weight)

        self.projection, self.bias = at_rest.projection, at_rest.bias
        self.wide = self.projection.new_empty(len(self.projection))
        q, k, latents, v = self.wide.view(1, 1, -1).split_with_sizes(at_rest.widths, dim=-1)
        self.couple = at_rest.within(q, k, latents)
        self.q, self.k = (part.view(1, 1, -1, heads.size) for part in (q, k))
        self.v = v.view(1, 1, heads.values, heads.value_size)
        self.vectors = self.wide[: (heads.queries + heads.keys) * heads.size].view(-1, heads.size)

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
        attention = self.attention
        x = (x * self.norm).mul_(_scale(x, self.eps))
        torch.mv(self.projection, x, out=self.wide)
        if self.bias is not None:
            self.wide += self.bias
        self.couple()
        if attention.q_norm is not None and attention.k_norm is not None:
            self.q.copy_(attention.q_norm(self.q))
            self.k.copy_(attention.k_norm(self.k))
        if rotation is not None:
            rotate_(self.vectors, rotation)
        keys, values = cache.append(self.k, self.v)
        length = keys.shape[1]
        mask = Mask() if attention.window is None else attention.mask_for(1, length, device=x.device)
        x = x.view(1, 1, -1)
        out = attention.scoring(self.q, keys, values, mask=mask, scale=attention.scale, dropout=0.0, x=x)
        gathered: Tensor = out.reshape(-1)
        return gathered


def _scale(x: Tensor, eps: float) -> float:
    """What RMSNorm multiplies x with, its weight aside."""
    return 1 / math.sqrt(torch.dot(x, x).item() / len(x) + eps)
