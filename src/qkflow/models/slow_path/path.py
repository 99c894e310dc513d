"""The slow path: transformer blocks over block means, added to the residual stream of later tokens.

    y = slow blocks(block means of x)     (B, K, C), one position per P tokens, K = ⌈T/P⌉
    u = φ(y) = W_down·silu(W_up·norm(y))  (B, K, C)
    x ← x + g ⊙ ũ                         (B, T, C), ũ_t = u of the last completed block, or 0

x is the residual stream before fast layer `pool_after`; at 0, the embeddings. Attention over blocks is
causal, and token t reads only blocks that end at or before t. The model is therefore causal for every g. Our
reading of Gao, arXiv 2606.16730: docs/slow_path.md.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from qkflow.attention import Attention
from qkflow.attention.init import ParamSampler
from qkflow.errors import InputError
from qkflow.models.slow_path.cache import SlowPathCache
from qkflow.models.slow_path.config import SlowPathConfig
from qkflow.models.slow_path.gate import Gate
from qkflow.models.slow_path.pooling import build_block_pooling, check_ratio


class FeedbackMLP(nn.Module):
    """φ(y) = W_down·silu(W_up·norm(y)): (B, K, C) → (B, K, C)."""

    def __init__(
        self, dim: int, hidden_dim: int, norm_eps: float, zero_output: bool, **factory_kwargs: Any
    ) -> None:
        super().__init__()
        self.zero_output = zero_output
        self.norm = nn.RMSNorm(dim, eps=norm_eps, **factory_kwargs)
        self.up = nn.Linear(dim, hidden_dim, bias=False, **factory_kwargs)
        self.down = nn.Linear(hidden_dim, dim, bias=False, **factory_kwargs)

    def forward(self, y: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.up(self.norm(y))))
        return out

    def init_parameters(self, sampler: ParamSampler) -> None:
        nn.init.ones_(self.norm.weight)
        sampler.init_linear("up", self.up)
        sampler.init_linear("down", self.down)
        if self.zero_output:
            nn.init.zeros_(self.down.weight)


class SlowPath(nn.Module):
    """Block pooling, slow transformer blocks, φ, and one gate per injection layer.

    `blocks` are transformer blocks of the fast path's type; `n_fast_layers` is the number of fast layers.
    """

    # overrides the roles declared inside: all of the slow path is one role for learning rates and freezing
    claims: ClassVar[dict[str, str]] = {"blocks": "slow", "phi": "slow"}

    def __init__(
        self,
        config: SlowPathConfig,
        blocks: list[nn.Module],
        dim: int,
        n_fast_layers: int,
        norm_eps: float,
        **factory_kwargs: Any,
    ) -> None:
        super().__init__()
        self.ratio, self.pool_after = config.ratio, config.pool_after
        self.blocks = nn.ModuleList(blocks)
        self.phi = FeedbackMLP(
            dim, config.hidden_dim or dim, norm_eps, config.output_init == "zero", **factory_kwargs
        )
        self.gates = nn.ModuleDict(
            {
                str(layer): Gate(dim, config.gate, config.gate_init, **factory_kwargs)
                for layer in config.injection_layers(n_fast_layers)
            }
        )

    def forward(
        self,
        x: Tensor,
        *,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: SlowPathCache | None = None,
    ) -> Tensor:
        """Return ũ (B, T, C) for the residual stream x (B, T, C); `inject` adds it before a fast layer."""
        if cache is not None:
            return self._forward_cached(x, attention_mask, document_ids, cache)
        if self.training:
            check_ratio(self.ratio, x.shape[1])
        if attention_mask is not None:  # padding is a document of its own, so no block mixes it with tokens
            is_token = attention_mask.long()
            document_ids = is_token if document_ids is None else 2 * document_ids + is_token
        pooling = build_block_pooling(x.shape[1], self.ratio, document_ids)
        return pooling.upsample(self._run_blocks(pooling.pool(x), pooling.document_ids))

    def inject(self, x: Tensor, slow_output: Tensor, layer: int) -> Tensor:
        """Return x + g ⊙ slow_output if fast layer `layer` has a gate, else x."""
        name = str(layer)
        return self.gates[name](x, slow_output) if name in self.gates else x

    def new_cache(self, batch: int, capacity: int) -> SlowPathCache:
        """Build an empty cache for `capacity` tokens, on the device and in the dtype of the parameters."""
        weight = self.phi.down.weight
        kv_caches = [block.attention.new_cache(batch, capacity // self.ratio) for block in self.blocks]  # type: ignore[operator, union-attr]
        factory_kwargs = {"device": weight.device, "dtype": weight.dtype}
        return SlowPathCache(self.ratio, kv_caches, batch, capacity, weight.shape[0], **factory_kwargs)

    def _forward_cached(
        self, x: Tensor, attention_mask: Tensor | None, document_ids: Tensor | None, cache: SlowPathCache
    ) -> Tensor:
        """Run the tokens after those in the cache; the slow blocks run once per completed block."""
        if document_ids is not None or (attention_mask is not None and not bool(attention_mask.all())):
            raise InputError(
                "incremental decoding with a slow path needs rows of equal length without padding or packed "
                "documents, because their blocks end at different steps; decode such rows one at a time",
                code="slow-path-ragged-batch",
            )
        means = cache.append_inputs(x)
        if means.shape[1]:
            cache.append_outputs(self._run_blocks(means, None, cache))
        return cache.read_outputs(x.shape[1])

    def _run_blocks(
        self, y: Tensor, document_ids: Tensor | None, cache: SlowPathCache | None = None
    ) -> Tensor:
        """Return u = φ(slow blocks(y)) (B, K, C) for block means y (B, K, C)."""
        first: Attention = self.blocks[0].attention  # type: ignore[assignment]
        past = cache.kv_caches[0].length if cache is not None else 0
        rotation = first.make_rotation(y, None, document_ids, past)
        mask = first.make_mask(y.shape[1], past + y.shape[1], None, document_ids, y.device)
        for layer, block in enumerate(self.blocks):
            y = block(y, rotation, mask, cache.kv_caches[layer] if cache is not None else None)
        u: Tensor = self.phi(y)
        return u
