"""A pre-norm decoder whose blocks take any registered attention."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qkflow.attention import Attention, KVCache
from qkflow.attention.couplings.base import refuse_offloaded
from qkflow.attention.init import Draw, fill, initialise
from qkflow.attention.masks import Mask
from qkflow.attention.rope import Rotation
from qkflow.errors import InputError
from qkflow.models.config import ModelConfig
from qkflow.models.kernels import RMSNorm, swiglu
from qkflow.models.slow_path.cache import SlowCache
from qkflow.models.slow_path.path import SlowPath


class FeedForward(nn.Module):
    """SwiGLU: W_down·(silu(W_gate·x) ⊙ W_up·x), or GELU: W_down·gelu(W_up·x)."""

    roles: ClassVar[dict[str, str]] = {"gate": "mlp", "up": "mlp", "down": "mlp"}

    def __init__(self, width: int, hidden: int, kind: str, **where: Any) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False, **where) if kind == "swiglu" else None
        self.up = nn.Linear(width, hidden, bias=False, **where)
        self.down = nn.Linear(hidden, width, bias=False, **where)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(self.up(x)) if self.gate is None else swiglu(self.gate(x), self.up(x))
        out: Tensor = self.down(inner)
        return out

    def start_parameters(self, draw: Draw) -> None:
        if self.gate is not None:
            draw.linear("gate", self.gate)
        draw.linear("up", self.up)
        draw.linear("down", self.down, residual=True)


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    roles: ClassVar[dict[str, str]] = {"attention_norm": "norm", "feed_forward_norm": "norm"}

    def __init__(self, config: ModelConfig, layer: int, **where: Any) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, eps=config.norm_eps, **where)
        self.attention = Attention(
            config.width,
            config.heads,
            kv_heads=config.kv_heads,
            head_size=config.head_size,
            layer=layer,
            layers=config.layers,
            start=config.start,
            **{f.name: getattr(config.attention, f.name) for f in dataclasses.fields(config.attention)},
            **where,
        )
        self.feed_forward_norm = RMSNorm(config.width, eps=config.norm_eps, **where)
        self.feed_forward = FeedForward(config.width, config.hidden_size, config.feed_forward, **where)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None = None,
        mask: Mask | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation=rotation, mask=mask, cache=cache)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out

    def start_parameters(self, draw: Draw) -> None:
        nn.init.ones_(self.attention_norm.weight)
        nn.init.ones_(self.feed_forward_norm.weight)


class Decoder(nn.Module):
    """Token ids in, hidden states or logits out."""

    roles: ClassVar[dict[str, str]] = {"embedding": "embed", "norm": "norm", "head": "head"}

    def __init__(
        self,
        config: ModelConfig,
        *,
        seed: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.config = config
        self.checkpoint_blocks = False  # trade time for memory: recompute each block in the backward pass
        # from a tensor, so that it is drawn once, by its start, and not before by PyTorch's default
        blank = torch.empty(config.vocabulary, config.width, **where)
        self.embedding = nn.Embedding.from_pretrained(blank, freeze=False)
        self.blocks = nn.ModuleList(Block(config, layer, **where) for layer in range(config.layers))
        self.norm = RMSNorm(config.width, eps=config.norm_eps, **where)
        self.head = None if config.tied else nn.Linear(config.width, config.vocabulary, bias=False, **where)
        self.slow = build_slow_path(config, **where)
        initialise(self, config.start, seed=seed, layers=config.layers)

    def forward(
        self,
        ids: Tensor,
        *,
        positions: Tensor | None = None,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
        caches: list[KVCache | SlowCache] | None = None,
    ) -> Tensor:
        """Hidden states (B, T, width) of token ids (B, T), after the last norm; see `logits`."""
        if ids.dim() != 2:
            raise InputError(f"a decoder takes token ids of shape (batch, tokens), not {tuple(ids.shape)}")
        return self.from_embeddings(
            self.embedding(ids), positions=positions, padding=padding, documents=documents, caches=caches
        )

    def from_embeddings(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
        caches: list[KVCache | SlowCache] | None = None,
    ) -> Tensor:
        """The same from token embeddings (B, T, width), for those who ask what a token's embedding does."""
        length = x.shape[1]
        past = caches[0].length if caches else 0
        first: Attention = self.blocks[0].attention  # type: ignore[assignment]
        rotation = first.rotation_for(x, positions, documents, past)
        mask = first.mask_for(length, past + length, padding, documents, x.device, x.shape[0])
        if self.slow is not None:
            heard = self.slow(x, padding=padding, documents=documents, cache=caches[-1] if caches else None)
        for layer, block in enumerate(self.blocks):
            if self.slow is not None:
                x = self.slow.inject(x, heard, layer)
            if self.checkpoint_blocks and self.training and caches is None:
                x = checkpoint(block, x, rotation, mask, use_reentrant=False)
            else:
                x = block(x, rotation, mask, caches[layer] if caches else None)
        out: Tensor = self.norm(x)
        return out

    def couplings_changed(self) -> None:
        """Have the config say what the couplings are by now: whoever saves it must be able to build this."""
        attention: Attention = self.blocks[0].attention  # type: ignore[assignment]
        slow = self.config.slow
        if self.slow is not None and slow is not None:
            spec = str(self.slow.blocks[0].attention.coupling_spec)  # type: ignore[union-attr]
            slow = dataclasses.replace(slow, attention={**slow.attention, "coupling": spec})
        self.config = dataclasses.replace(
            self.config,
            attention=dataclasses.replace(self.config.attention, coupling=str(attention.coupling_spec)),
            slow=slow,
        )

    @property
    def output_weight(self) -> Tensor:
        """The matrix (V, width) that turns hidden states into logits."""
        return self.embedding.weight if self.head is None else self.head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        if self.head is not None:
            out: Tensor = self.head(hidden)
            return out
        refuse_offloaded(self.embedding.weight, hidden, around="QKFlowForCausalLM")
        return F.linear(hidden, self.embedding.weight)

    def new_caches(self, batch: int, capacity: int) -> list[KVCache | SlowCache]:
        """One empty cache a layer, and after them the slow path's if there is one."""
        paths = [*(block.attention for block in self.blocks), *([self.slow] if self.slow is not None else [])]
        return [path.new_cache(batch, capacity) for path in paths]  # type: ignore[operator, union-attr]

    def start_parameters(self, draw: Draw) -> None:
        # tied, the embedding is also the output matrix, whose fan-in is the width
        weight = self.embedding.weight
        fill(weight, draw.matrix("embedding.weight", weight.shape, self.config.width))
        if self.head is not None:
            draw.linear("head", self.head)
        nn.init.ones_(self.norm.weight)


def build_slow_path(config: ModelConfig, **where: Any) -> SlowPath | None:
    if config.slow is None:
        return None
    slow = config.of_slow_path()
    blocks: list[nn.Module] = [Block(slow, layer, **where) for layer in range(slow.layers)]
    return SlowPath(config.slow, blocks, config.width, config.layers, config.norm_eps, **where)
