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
from qkflow.attention.init import Draw
from qkflow.errors import InputError
from qkflow.models.slow_path.cache import SlowCache
from qkflow.models.slow_path.config import SlowConfig
from qkflow.models.slow_path.gate import Gate
from qkflow.models.slow_path.pooling import blocks as blocks_of
from qkflow.models.slow_path.pooling import check_ratio


class Phi(nn.Module):
    """φ_θ: from the slow state to what is said to the fast path."""

    def __init__(self, width: int, hidden: int, norm_eps: float, zero_output: bool, **where: Any) -> None:
        super().__init__()
        self.zero_output = zero_output
        self.norm = nn.RMSNorm(width, eps=norm_eps, **where)
        self.up = nn.Linear(width, hidden, bias=False, **where)
        self.down = nn.Linear(hidden, width, bias=False, **where)

    def forward(self, y: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.up(self.norm(y))))
        return out

    def start_parameters(self, draw: Draw) -> None:
        nn.init.ones_(self.norm.weight)
        draw.linear("up", self.up)
        draw.linear("down", self.down)
        if self.zero_output:
            nn.init.zeros_(self.down.weight)


class SlowPath(nn.Module):
    """`blocks` are transformer blocks as the fast path's; `fast_layers` is how many of those there are."""

    # over the roles that blocks give their own parts: the slow path learns, freezes and counts as one
    claims: ClassVar[dict[str, str]] = {"blocks": "slow", "phi": "slow"}

    def __init__(
        self,
        config: SlowConfig,
        blocks: list[nn.Module],
        width: int,
        fast_layers: int,
        norm_eps: float,
        **where: Any,
    ) -> None:
        super().__init__()
        self.ratio = config.ratio
        self.blocks = nn.ModuleList(blocks)
        self.phi = Phi(width, config.hidden or width, norm_eps, config.output == "zero", **where)
        self.gates = nn.ModuleDict(
            {
                str(layer): Gate(width, config.gate, config.start, **where)
                for layer in config.injections(fast_layers)
            }
        )

    def forward(
        self,
        x: Tensor,
        *,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
        cache: SlowCache | None = None,
    ) -> Tensor:
        """ũ: what each token (B, T, width) hears; `inject` puts it into the fast path."""
        if cache is not None:
            return self._next(x, padding, documents, cache)
        if self.training:
            check_ratio(self.ratio, x.shape[1])
        if padding is not None:  # blocks keep to real tokens as they keep to a document
            real = padding.long()
            documents = real if documents is None else 2 * documents + real
        layout = blocks_of(x.shape[1], self.ratio, documents)
        return layout.feedback(self._speak(layout.pool(x), layout.documents))

    def inject(self, x: Tensor, heard: Tensor, layer: int) -> Tensor:
        """The input of a fast layer, with what the slow path says where there is a gate."""
        gate = str(layer)
        return self.gates[gate](x, heard) if gate in self.gates else x

    def new_cache(self, batch: int, capacity: int) -> SlowCache:
        """An empty cache for `capacity` tokens, on the path's device and in its precision."""
        weight = self.phi.down.weight
        layers = [block.attention.new_cache(batch, capacity // self.ratio) for block in self.blocks]  # type: ignore[operator, union-attr]
        where = {"device": weight.device, "dtype": weight.dtype}
        return SlowCache(self.ratio, layers, batch, capacity, weight.shape[0], **where)

    def _next(self, x: Tensor, padding: Tensor | None, documents: Tensor | None, cache: SlowCache) -> Tensor:
        """The same for the tokens after those in the cache; runs the blocks only when some are complete."""
        if documents is not None or (padding is not None and not bool(padding.all())):
            raise InputError(
                "with a slow path, incremental decoding takes rows of equal length: padded or packed rows "
                "complete their blocks at different times; decode them apart"
            )
        means = cache.push(x)
        if means.shape[1]:
            cache.keep(self._speak(means, None, cache))
        return cache.heard(x.shape[1])

    def _speak(self, y: Tensor, documents: Tensor | None, cache: SlowCache | None = None) -> Tensor:
        """u = φ(slow blocks(y)) for block means (B, K, width)."""
        first: Attention = self.blocks[0].attention  # type: ignore[assignment]
        past = cache.layers[0].length if cache is not None else 0
        rotation = first.rotation_for(y, None, documents, past)
        mask = first.mask_for(y.shape[1], past + y.shape[1], None, documents, y.device)
        for layer, block in enumerate(self.blocks):
            y = block(y, rotation, mask, cache.layers[layer] if cache is not None else None)
        u: Tensor = self.phi(y)
        return u
