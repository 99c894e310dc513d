"""A pre-norm transformer (decoder, or encoder with `causal=False`) with any registered attention."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qkflow.attention import Attention, KVCache
from qkflow.attention.attention import attention_layers
from qkflow.attention.init import ParamSampler, copy_into, initialize
from qkflow.attention.masks import Mask
from qkflow.attention.projections import check_not_offloaded
from qkflow.attention.rope import Rotation
from qkflow.errors import InputError
from qkflow.models.config import ModelConfig
from qkflow.models.loss import Reduction, linear_cross_entropy, softcap_logits
from qkflow.models.slow_path.cache import SlowPathCache
from qkflow.models.slow_path.path import SlowPath


class FeedForward(nn.Module):
    """SwiGLU: W_down·(silu(W_gate·x) ⊙ W_up·x), or GELU: W_down·gelu(W_up·x)."""

    roles: ClassVar[dict[str, str]] = {"gate": "mlp", "up": "mlp", "down": "mlp"}

    def __init__(self, dim: int, hidden_dim: int, kind: str, **factory_kwargs: Any) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden_dim, bias=False, **factory_kwargs) if kind == "swiglu" else None
        self.up = nn.Linear(dim, hidden_dim, bias=False, **factory_kwargs)
        self.down = nn.Linear(hidden_dim, dim, bias=False, **factory_kwargs)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        out: Tensor = self.down(hidden)
        return out

    def init_parameters(self, sampler: ParamSampler) -> None:
        if self.gate is not None:
            sampler.init_linear("gate", self.gate, part="mlp")
        sampler.init_linear("up", self.up, part="mlp")
        sampler.init_linear("down", self.down, part="out")


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    roles: ClassVar[dict[str, str]] = {"attention_norm": "norm", "feed_forward_norm": "norm"}

    def __init__(self, config: ModelConfig, layer_idx: int, **factory_kwargs: Any) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps, **factory_kwargs)
        self.attention = Attention(
            config.dim,
            config.n_heads,
            n_kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            layer_idx=layer_idx,
            n_layers=config.n_layers,
            init=config.init,
            causal=config.causal,
            **{f.name: getattr(config.attention, f.name) for f in dataclasses.fields(config.attention)},
            **factory_kwargs,
        )
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=config.norm_eps, **factory_kwargs)
        self.feed_forward = FeedForward(
            config.dim, config.resolved_hidden_dim, config.feed_forward, **factory_kwargs
        )

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

    def init_parameters(self, sampler: ParamSampler) -> None:
        nn.init.ones_(self.attention_norm.weight)
        nn.init.ones_(self.feed_forward_norm.weight)


class Decoder(nn.Module):
    """Pre-norm transformer from token ids (B, T) to hidden states (B, T, dim) or logits (B, T, V)."""

    roles: ClassVar[dict[str, str]] = {
        "embedding": "embed",
        "embedding_norm": "norm",
        "norm": "norm",
        "head": "head",
    }

    def __init__(
        self,
        config: ModelConfig,
        *,
        seed: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self.config = config
        self.activation_checkpointing = False  # recompute each block in the backward pass to save memory
        # nn.Embedding(...) would sample the weight, only for `initialize` to overwrite it
        embedding = torch.empty(config.vocab_size, config.dim, **factory_kwargs)
        self.embedding = nn.Embedding.from_pretrained(embedding, freeze=False)
        self.embedding_norm = (
            nn.RMSNorm(config.dim, eps=config.norm_eps, **factory_kwargs) if config.embedding_norm else None
        )
        self.blocks = nn.ModuleList(
            Block(config, layer, **factory_kwargs) for layer in range(config.n_layers)
        )
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps, **factory_kwargs)
        self.head = (
            None
            if config.tie_embeddings
            else nn.Linear(config.dim, config.vocab_size, bias=False, **factory_kwargs)
        )
        self.slow = build_slow_path(config, **factory_kwargs)
        initialize(self, config.init, seed=seed, n_layers=config.n_layers)

    def forward(
        self,
        ids: Tensor,
        *,
        positions: Tensor | None = None,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        caches: list[KVCache | SlowPathCache] | None = None,
    ) -> Tensor:
        """Return hidden states (B, T, dim) of token ids (B, T), after the last norm; see `logits`."""
        if ids.dim() != 2:
            raise InputError(
                f"token ids must have the shape (batch, tokens), not {tuple(ids.shape)}",
                code="token-ids-shape",
            )
        return self.forward_embeddings(
            self.embedding(ids),
            positions=positions,
            attention_mask=attention_mask,
            document_ids=document_ids,
            caches=caches,
        )

    def forward_embeddings(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        caches: list[KVCache | SlowPathCache] | None = None,
    ) -> Tensor:
        """Return hidden states of token embeddings (B, T, dim), e.g. for attributions.

        The embeddings are those of `self.embedding`; the embedding norm, if there is one, is applied here.
        """
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        length = x.shape[1]
        past_length = caches[0].length if caches else 0
        first: Attention = self.blocks[0].attention  # type: ignore[assignment]
        rotation = first.make_rotation(x, positions, document_ids, past_length)
        mask = first.make_mask(
            length, past_length + length, attention_mask, document_ids, x.device, x.shape[0]
        )
        for layer, block in enumerate(self.blocks):
            if self.slow is not None and layer == self.slow.pool_after:
                slow_output = self.slow(
                    x,
                    attention_mask=attention_mask,
                    document_ids=document_ids,
                    cache=caches[-1] if caches else None,
                )
            if self.slow is not None and layer >= self.slow.pool_after:
                x = self.slow.inject(x, slow_output, layer)
            if self.activation_checkpointing and self.training and caches is None:
                x = checkpoint(block, x, rotation, mask, use_reentrant=False)
            else:
                x = block(x, rotation, mask, caches[layer] if caches else None)
        out: Tensor = self.norm(x)
        return out

    def sync_config(self) -> None:
        """Update the config to the current couplings, so that the model can be rebuilt from it."""
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
        """The output matrix (V, dim)."""
        return self.embedding.weight if self.head is None else self.head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (…, V) of hidden states (…, dim)."""
        if self.head is not None:
            return softcap_logits(self.head(hidden), self.config.logit_softcap)
        check_not_offloaded(self.embedding.weight, hidden, "QKFlowForCausalLM")
        return softcap_logits(F.linear(hidden, self.embedding.weight), self.config.logit_softcap)

    def loss(self, hidden: Tensor, targets: Tensor, *, reduction: Reduction = "mean") -> Tensor:
        """Return the cross-entropy of hidden states (…, dim) against token ids (…), without all logits."""
        return linear_cross_entropy(
            hidden, self.output_weight, targets, reduction=reduction, softcap=self.config.logit_softcap
        )

    def prepare_for_inference(self) -> Self:
        """Prepare every attention layer (see `Attention.prepare_for_inference`); undone by `.train()`."""
        for layer in attention_layers(self):
            layer.prepare_for_inference()
        return self

    def new_caches(self, batch_size: int, capacity: int) -> list[KVCache | SlowPathCache]:
        """Return one empty cache per layer, and the cache of the slow path last, if there is one."""
        paths = [*(block.attention for block in self.blocks), *([self.slow] if self.slow is not None else [])]
        return [path.new_cache(batch_size, capacity) for path in paths]  # type: ignore[operator, union-attr]

    def init_parameters(self, sampler: ParamSampler) -> None:
        # with tied embeddings this is also the output matrix, whose fan-in is dim
        weight = self.embedding.weight
        copy_into(weight, sampler.matrix("embedding.weight", weight.shape, self.config.dim, part="embed"))
        if self.head is not None:
            sampler.init_linear("head", self.head, part="head")
        for norm in (self.embedding_norm, self.norm):
            if norm is not None:
                nn.init.ones_(norm.weight)


def build_slow_path(config: ModelConfig, **factory_kwargs: Any) -> SlowPath | None:
    if config.slow is None:
        return None
    slow = config.slow_path_config()
    blocks: list[nn.Module] = [Block(slow, layer, **factory_kwargs) for layer in range(slow.n_layers)]
    return SlowPath(config.slow, blocks, config.dim, config.n_layers, config.norm_eps, **factory_kwargs)
