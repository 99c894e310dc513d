"""The slow path: attention over block means, heard by the tokens that come after each block.

    y = slow blocks(block means of x)      one step for every P tokens
    u = φ(y)                               φ: norm, two matrices with SiLU between
    x ← x + g ⊙ ũ                          ũ_t: u of the last completed block, zeros before the first

Blocks attend to blocks before them and to themselves; a block is read only once its last token is there.
So no token hears of the future, whatever the gate. Our reading of Gao, arXiv 2606.16730: docs/timescale.md.
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
from qkflow.models.slow_path.pooling import build_block_pooling as blocks_of
from qkflow.models.slow_path.pooling import check_ratio


class FeedbackMLP(nn.Module):
    """φ_θ: from the slow state to what is said to the fast path."""

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
    """`blocks` are transformer blocks as the fast path's; `fast_layers` is how many of those there are."""

    # over the roles that blocks give their own parts: the slow path learns, freezes and counts as one
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
        self.ratio = config.ratio
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
        """ũ: what each token (B, T, width) hears; `inject` puts it into the fast path."""
        if cache is not None:
            return self._forward_cached(x, attention_mask, document_ids, cache)
        if self.training:
            check_ratio(self.ratio, x.shape[1])
        if attention_mask is not None:  # blocks keep to real tokens as they keep to a document
            real = attention_mask.long()
            document_ids = real if document_ids is None else 2 * document_ids + real
        layout = blocks_of(x.shape[1], self.ratio, document_ids)
        return layout.upsample(self._run_blocks(layout.pool(x), layout.document_ids))

    def inject(self, x: Tensor, slow_output: Tensor, layer: int) -> Tensor:
        """The input of a fast layer, with what the slow path says where there is a gate."""
        gate = str(layer)
        return self.gates[gate](x, slow_output) if gate in self.gates else x

    def new_cache(self, batch: int, capacity: int) -> SlowPathCache:
        """An empty cache for `capacity` tokens, on the path's device and in its precision."""
        weight = self.phi.down.weight
        layers = [block.attention.new_cache(batch, capacity // self.ratio) for block in self.blocks]  # type: ignore[operator, union-attr]
        where = {"device": weight.device, "dtype": weight.dtype}
        return SlowPathCache(self.ratio, layers, batch, capacity, weight.shape[0], **where)

    def _forward_cached(
        self, x: Tensor, attention_mask: Tensor | None, document_ids: Tensor | None, cache: SlowPathCache
    ) -> Tensor:
        """The same for the tokens after those in the cache; runs the blocks only when some are complete."""
        if document_ids is not None or (attention_mask is not None and not bool(attention_mask.all())):
            raise InputError(
                "with a slow path, incremental decoding takes rows of equal length: padded or packed rows "
                "complete their blocks at different times; decode them apart"
            )
        means = cache.append_inputs(x)
        if means.shape[1]:
            cache.append_outputs(self._run_blocks(means, None, cache))
        return cache.read_outputs(x.shape[1])

    def _run_blocks(
        self, y: Tensor, document_ids: Tensor | None, cache: SlowPathCache | None = None
    ) -> Tensor:
        """u = φ(slow blocks(y)) for block means (B, K, width)."""
        first: Attention = self.blocks[0].attention  # type: ignore[assignment]
        past = cache.kv_caches[0].length if cache is not None else 0
        rotation = first.make_rotation(y, None, document_ids, past)
        mask = first.make_mask(y.shape[1], past + y.shape[1], None, document_ids, y.device)
        for layer, block in enumerate(self.blocks):
            y = block(y, rotation, mask, cache.kv_caches[layer] if cache is not None else None)
        u: Tensor = self.phi(y)
        return u
