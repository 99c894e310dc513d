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
from qkflow.attention.projections import FactorizedOV, FactorizedQK, has_no_hooks, is_plain_linear
from qkflow.attention.rope import Rotation, apply_rope_
from qkflow.models.decoder import Block, Decoder
from qkflow.models.slow_path.cache import SlowPathCache


class PackedWeights:
    """Matrices laid out for one token, each once: decoders that are given the same share their memory."""

    def __init__(self) -> None:
        self._packed: dict[tuple[int, ...], tuple[tuple[Tensor, ...], Tensor]] = {}

    def __call__(self, *weights: Tensor) -> Tensor:
        """These weights, one below the other."""
        places = tuple(weight.data_ptr() for weight in weights)
        if places not in self._packed:  # the weights are kept too, so that no other ever lies in their place
            self._packed[places] = weights, for_products(torch.cat(weights) if weights[1:] else weights[0])
        return self._packed[places][1]


class CPUDecoder:
    """Decodes a single sequence from caches that the model has filled."""

    def __init__(
        self,
        model: Decoder,
        caches: Sequence[KVCache | SlowPathCache],
        packed_weights: PackedWeights | None = None,
    ) -> None:
        assert self.supports(model)
        self.model = model
        self.eps = model.config.norm_eps
        self.caches = [cache for cache in caches if isinstance(cache, KVCache)]
        lay_out = packed_weights or PackedWeights()
        self.block_stack = _BlockStack(model.blocks, self.caches[0].capacity, self.eps, lay_out)
        self.output_weight = lay_out(model.output_weight)
        if model.slow is not None:
            assert isinstance(caches[-1], SlowPathCache)
            self.slow_cache = caches[-1]
            capacity = self.slow_cache.kv_caches[0].capacity
            self.slow_block_stack = _BlockStack(model.slow.blocks, capacity, self.eps, lay_out)

    @staticmethod
    def supports(model: Decoder) -> bool:
        """Whether this way of decoding knows the model's parts, as we made them, and pays here."""
        weight = model.embedding.weight
        blocks = [*model.blocks, *(model.slow.blocks if model.slow is not None else [])]
        return (
            weight.device.type == "cpu"
            and weight.dtype in (torch.float32, torch.float64)
            and all(_is_supported_block(block) for block in blocks)
            and (model.head is None or is_plain_linear(model.head))
            and all(has_no_hooks(module) for module in model.modules())
        )

    def logits(self, token: int) -> Tensor:
        """Logits (V,) of what follows `token`, which is read into the caches."""
        x = self.model.embedding.weight[token]
        x = self.block_stack(x, self.caches, self._slow_path_injection(x))
        return torch.mv(self.output_weight, x * self.model.norm.weight).mul_(_inverse_rms(x, self.eps))

    def _slow_path_injection(self, x: Tensor) -> Callable[[Tensor, int], Tensor] | None:
        """What the slow path adds before each layer; its layers run when x completes a block."""
        slow = self.model.slow
        if slow is None:
            return None
        mean = self.slow_cache.append_inputs(x.view(1, 1, -1))
        if mean.shape[1]:
            y = self.slow_block_stack(mean.view(-1), self.slow_cache.kv_caches)
            self.slow_cache.append_outputs(slow.phi(y.view(1, 1, -1)))
        heard = self.slow_cache.read_outputs(1).view(-1)
        return lambda x, layer: slow.inject(x, heard, layer)


def _is_supported_block(block: nn.Module) -> bool:
    if type(block) is not Block:
        return False
    qk, ov, ff = block.attention.qk, block.attention.ov, block.feed_forward
    if not (isinstance(qk, FactorizedQK) and isinstance(ov, FactorizedOV)):
        return False
    used = [ov.v, ov.o, ff.up, ff.down, *([] if ff.gate is None else [ff.gate])]
    return qk.is_plain and qk.q.bias is None and all(is_plain_linear(layer) for layer in used)


class _BlockStack:
    """Blocks that a token passes one after the other."""

    def __init__(
        self, blocks: nn.ModuleList, capacity: int, eps: float, packed_weights: PackedWeights
    ) -> None:
        self.layers = [_PackedBlock(block, eps, packed_weights) for block in blocks]  # type: ignore[arg-type]
        first = self.layers[0].attention
        self.rotation_table = first.make_rotation(
            self.layers[0].attention_norm_weight.expand(1, capacity, -1)
        )

    def __call__(
        self, x: Tensor, caches: list[KVCache], inject: Callable[[Tensor, int], Tensor] | None = None
    ) -> Tensor:
        position = caches[0].length
        rotation = None
        if self.rotation_table is not None:
            cos, sin = self.rotation_table
            rotation = cos[position], sin[position]
        for number, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            if inject is not None:
                x = inject(x, number)
            x = layer.forward(x, rotation, cache)
        return x


class _PackedBlock:
    """A block with its weights laid out for one token, and places for what is made of it.

    Results go to the same memory at every token, so that all views of it are made once: cutting tensors takes
    as long as computing with ones as small as these.
    """

    def __init__(self, block: Block, eps: float, packed_weights: PackedWeights) -> None:
        attention, ff = block.attention, block.feed_forward
        qk, ov, heads = attention.qk, attention.ov, attention.head_shapes
        assert isinstance(qk, FactorizedQK)
        assert isinstance(ov, FactorizedOV)
        at_rest = attention.coupling.at_rest(qk) or AsEver(*plain(qk), attention.coupling)
        at_rest = at_rest.with_values(ov.v)
        self.attention, self.eps = attention, eps
        self.attention_norm_weight, self.feed_forward_norm_weight = (
            block.attention_norm.weight,
            block.feed_forward_norm.weight,
        )
        self.o_weight, self.down_weight = packed_weights(ov.o.weight), packed_weights(ff.down.weight)
        self.is_gated = ff.gate is not None
        self.gate_up_weight = (
            packed_weights(ff.gate.weight, ff.up.weight) if ff.gate else packed_weights(ff.up.weight)
        )

        self.qkv_weight, self.qkv_bias = at_rest.projection, at_rest.bias
        self.qkv_buffer = self.qkv_weight.new_empty(len(self.qkv_weight))
        q, k, latents, v = self.qkv_buffer.view(1, 1, -1).split_with_sizes(at_rest.widths, dim=-1)
        self.apply_coupling = at_rest.within(q, k, latents)
        self.q, self.k = (part.view(1, 1, -1, heads.head_dim) for part in (q, k))
        self.v = v.view(1, 1, heads.n_v, heads.v_head_dim)
        self.qk_heads = self.qkv_buffer[: (heads.n_q + heads.n_k) * heads.head_dim].view(-1, heads.head_dim)

    def forward(self, x: Tensor, rotation: Rotation | None, cache: KVCache) -> Tensor:
        x = torch.addmv(x, self.o_weight, self._attention_output(x, rotation, cache))
        inner = torch.mv(self.gate_up_weight, x * self.feed_forward_norm_weight).mul_(
            _inverse_rms(x, self.eps)
        )
        if self.is_gated:
            gate, up = inner.chunk(2)
            inner = F.silu(gate).mul_(up)
        else:
            inner = F.gelu(inner)
        return torch.addmv(x, self.down_weight, inner)

    def _attention_output(self, x: Tensor, rotation: Rotation | None, cache: KVCache) -> Tensor:
        attention = self.attention
        x = (x * self.attention_norm_weight).mul_(_inverse_rms(x, self.eps))
        torch.mv(self.qkv_weight, x, out=self.qkv_buffer)
        if self.qkv_bias is not None:
            self.qkv_buffer += self.qkv_bias
        self.apply_coupling()
        if attention.q_norm is not None and attention.k_norm is not None:
            self.q.copy_(attention.q_norm(self.q))
            self.k.copy_(attention.k_norm(self.k))
        if rotation is not None:
            apply_rope_(self.qk_heads, rotation)
        keys, values = cache.append(self.k, self.v)
        length = keys.shape[1]
        mask = Mask() if attention.window is None else attention.make_mask(1, length, device=x.device)
        x = x.view(1, 1, -1)
        out = attention.scoring(self.q, keys, values, mask=mask, scale=attention.scale, dropout=0.0, x=x)
        gathered: Tensor = out.reshape(-1)
        return gathered


def _inverse_rms(x: Tensor, eps: float) -> float:
    """What RMSNorm multiplies x with, its weight aside."""
    return 1 / math.sqrt(torch.dot(x, x).item() / len(x) + eps)
