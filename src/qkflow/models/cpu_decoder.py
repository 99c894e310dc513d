"""CPU decoder for batch size 1. Decoding is memory-bound: every weight is read once per token.

The regular forward is written for many tokens. Here every matmul is a matrix-vector product with a weight in
its fastest layout. Queries, keys and values are one product, gate and up another. The 1/RMS of a norm is a
scalar, applied after the product. Coupling, scoring and caches are those of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkflow.attention import Attention, KVCache
from qkflow.attention.couplings import Coupling
from qkflow.attention.masks import Mask
from qkflow.attention.projections import FactorizedOV, FactorizedQK, can_fuse, has_no_hooks, is_plain_linear
from qkflow.attention.rope import Rotation, apply_rope
from qkflow.models.decoder import Block, Decoder, FeedForward
from qkflow.models.loss import softcap_logits
from qkflow.models.slow_path.cache import SlowPathCache


class PackedWeights:
    """Cache of weights laid out for matrix-vector products. Decoders with the same object share memory."""

    def __init__(self) -> None:
        self._packed: dict[tuple[int, ...], tuple[tuple[Tensor, ...], Tensor]] = {}

    def __call__(self, *weights: Tensor) -> Tensor:
        """Return these weights, stacked and laid out."""
        addresses = tuple(weight.data_ptr() for weight in weights)
        if addresses not in self._packed:  # holds the weights, so that no address is reused
            stacked = torch.cat(weights) if weights[1:] else weights[0]
            self._packed[addresses] = weights, matvec_layout(stacked)
        return self._packed[addresses][1]


def matvec_layout(weight: Tensor) -> Tensor:
    """Return the matrix in column-major order if it has more rows than columns.

    The row-major kernel sums row by row, which is slow for short rows.
    """
    weight = weight.detach()
    return weight.t().contiguous().t() if weight.shape[0] > weight.shape[1] else weight.contiguous()


class CPUDecoder:
    """Decodes one sequence from caches that the model has filled."""

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
        pack = packed_weights or PackedWeights()
        self.block_stack = _BlockStack(model.blocks, self.caches[0].capacity, self.eps, pack)
        self.output_weight = pack(model.output_weight)
        if model.slow is not None:
            assert isinstance(caches[-1], SlowPathCache)
            self.slow_cache = caches[-1]
            capacity = self.slow_cache.kv_caches[0].capacity
            self.slow_block_stack = _BlockStack(model.slow.blocks, capacity, self.eps, pack)

    @staticmethod
    def supports(model: Decoder) -> bool:
        """Whether the model is on the CPU, in one dtype, and has plain qkflow modules without hooks."""
        dtype = model.embedding.weight.dtype
        blocks = [*model.blocks, *(model.slow.blocks if model.slow is not None else [])]
        return (
            dtype in (torch.float32, torch.float64)
            and all(x.device.type == "cpu" and x.dtype == dtype for x in model.parameters())
            and not torch.is_autocast_enabled("cpu")
            and type(model.embedding) is nn.Embedding
            and type(model.norm) is nn.RMSNorm
            and all(_is_supported_block(block) for block in blocks)
            and all(can_fuse(block.attention.coupling, dtype) for block in blocks)
            and (model.head is None or is_plain_linear(model.head))
            and all(has_no_hooks(module) for module in model.modules())
        )

    def logits(self, token: int) -> Tensor:
        """Append `token` to the caches and return the logits (V,) of the next one."""
        x = self.model.embedding.weight[token]
        if self.model.embedding_norm is not None:
            x = self.model.embedding_norm(x)
        inject = None if self.model.slow is None else self._inject_slow_path
        x = self.block_stack(x, self.caches, inject)
        logits = torch.mv(self.output_weight, x * self.model.norm.weight).mul_(_inverse_rms(x, self.eps))
        return softcap_logits(logits, self.model.config.logit_softcap)

    def _inject_slow_path(self, x: Tensor, layer: int) -> Tensor:
        """Return the input (dim,) of fast layer `layer`; the slow layers run when x completes a block."""
        slow = self.model.slow
        assert slow is not None
        if layer == slow.pool_after:
            mean = self.slow_cache.append_inputs(x.view(1, 1, -1))
            if mean.shape[1]:
                y = self.slow_block_stack(mean.view(-1), self.slow_cache.kv_caches)
                self.slow_cache.append_outputs(slow.phi(y.view(1, 1, -1)))
            self.slow_output = self.slow_cache.read_outputs(1).view(-1)
        return slow.inject(x, self.slow_output, layer) if layer >= slow.pool_after else x


def _is_supported_block(block: nn.Module) -> bool:
    if type(block) is not Block or type(block.attention) is not Attention:
        return False
    qk, ov, ff = block.attention.qk, block.attention.ov, block.feed_forward
    if not (isinstance(qk, FactorizedQK) and isinstance(ov, FactorizedOV) and type(ff) is FeedForward):
        return False
    if not type(block.attention_norm) is type(block.feed_forward_norm) is nn.RMSNorm:
        return False
    linears = [ov.v, ov.o, ff.up, ff.down, *([] if ff.gate is None else [ff.gate])]
    return qk.is_plain and qk.q.bias is None and all(is_plain_linear(layer) for layer in linears)


class _BlockStack:
    """The blocks of one path."""

    def __init__(self, blocks: nn.ModuleList, capacity: int, eps: float, pack: PackedWeights) -> None:
        self.blocks = [_PackedBlock(block, eps, pack) for block in blocks]  # type: ignore[arg-type]
        like = self.blocks[0].attention_norm_weight.expand(1, capacity, -1)
        self.rotation_table = self.blocks[0].attention.make_rotation(like)

    def __call__(
        self, x: Tensor, caches: list[KVCache], inject: Callable[[Tensor, int], Tensor] | None = None
    ) -> Tensor:
        position = caches[0].length
        rotation = None
        if self.rotation_table is not None:
            cos, sin = self.rotation_table
            rotation = cos[position], sin[position]
        for layer_idx, (block, cache) in enumerate(zip(self.blocks, caches, strict=True)):
            if inject is not None:
                x = inject(x, layer_idx)
            x = block.forward(x, rotation, cache)
        return x


class _PackedBlock:
    """A block with its weights laid out for one token."""

    def __init__(self, block: Block, eps: float, pack: PackedWeights) -> None:
        attention, ff = block.attention, block.feed_forward
        qk, ov, shapes = attention.qk, attention.ov, attention.head_shapes
        assert isinstance(qk, FactorizedQK)
        assert isinstance(ov, FactorizedOV)
        prepared = attention.coupling.prepare_for_inference(qk)
        if prepared is None:
            prepared = Coupling.prepare_for_inference(attention.coupling, qk)
        assert prepared is not None
        self.prepared = prepared.with_values(ov.v)
        self.attention, self.shapes, self.eps = attention, shapes, eps
        self.attention_norm_weight = block.attention_norm.weight
        self.feed_forward_norm_weight = block.feed_forward_norm.weight
        self.qkv_weight, self.qkv_bias = matvec_layout(self.prepared.weight), self.prepared.bias
        self.o_weight, self.down_weight = pack(ov.o.weight), pack(ff.down.weight)
        self.is_gated = ff.gate is not None
        self.gate_up_weight = pack(ff.gate.weight, ff.up.weight) if ff.gate else pack(ff.up.weight)

    def forward(self, x: Tensor, rotation: Rotation | None, cache: KVCache) -> Tensor:
        x = torch.addmv(x, self.o_weight, self._attention_output(x, rotation, cache))
        hidden = torch.mv(self.gate_up_weight, x * self.feed_forward_norm_weight)
        hidden.mul_(_inverse_rms(x, self.eps))
        if self.is_gated:
            gate, up = hidden.chunk(2)
            hidden = F.silu(gate).mul_(up)
        else:
            hidden = F.gelu(hidden)
        return torch.addmv(x, self.down_weight, hidden)

    def _attention_output(self, x: Tensor, rotation: Rotation | None, cache: KVCache) -> Tensor:
        attention = self.attention
        x = (x * self.attention_norm_weight).mul_(_inverse_rms(x, self.eps))
        out = torch.mv(self.qkv_weight, x)
        if self.qkv_bias is not None:
            out += self.qkv_bias
        q, k, v = self.prepared.unpack(out.view(1, 1, -1))
        if attention.q_norm is not None and attention.k_norm is not None:
            q, k = attention.q_norm(q), attention.k_norm(k)
        if rotation is not None:
            q, k = apply_rope(q, rotation), apply_rope(k, rotation)
        v = v.view(1, 1, self.shapes.n_v, self.shapes.v_head_dim)
        keys, values = cache.append(k, v)
        n_keys = keys.shape[1]
        mask = Mask() if attention.window is None else attention.make_mask(1, n_keys, device=x.device)
        x = x.view(1, 1, -1)
        out = attention.scoring(q, keys, values, mask=mask, scale=attention.scale, dropout=0.0, x=x)
        return out.reshape(-1)


def _inverse_rms(x: Tensor, eps: float) -> float:
    """Return 1/√(mean(x²) + ε)."""
    return 1 / math.sqrt(torch.dot(x, x).item() / len(x) + eps)
