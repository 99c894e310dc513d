"""Exported models in TransformerLens 4: residual stream, norms, attention and feed-forward have hooks.

    from qkflow.hf.transformer_lens import open_bridge
    bridge = open_bridge("path/to/exported")                # a folder of `qkflow export --to qkflow`
    logits, cache = bridge.run_with_cache(ids)
    cache["blocks.0.attn.hook_pattern"]                     # (B, H, T, T), after the coupling

`hook_pattern` can be read only: the weights are computed a second time in their textbook form. Queries and
keys have no hooks, because a coupling changes them between projection and score.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.architecture_adapter import ArchitectureAdapter
from transformer_lens.model_bridge.generalized_components import (
    BlockBridge,
    EmbeddingBridge,
    RMSNormalizationBridge,
    UnembeddingBridge,
)
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformer_lens.model_bridge.sources import build_bridge_from_module

from qkflow.hf.modeling import QKFlowForCausalLM
from qkflow.hf.pretrained import load_transformers

ARCHITECTURE = "QKFlowForCausalLM"


class SublayerBridge(GeneralizedComponent):
    """Hooks at the input and the output of a module."""

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        out: Tensor = self.hook_out(self.original_component(self.hook_in(x), **options))
        return out


class CoupledAttentionBridge(SublayerBridge):
    """`Attention` with a hook that reads its weights."""

    def __init__(self, name: str, config: Any) -> None:
        super().__init__(name, config)
        self.hook_pattern = HookPoint()

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        if self.hook_pattern.has_hooks():
            self.hook_pattern(self.original_component.reference(x)[1])
        return super().forward(x, **options)


class DecoderBlockBridge(BlockBridge):
    """A block under the names of TransformerLens, without those of the inputs of queries, keys and values."""

    hook_aliases: ClassVar[dict[str, str]] = {
        "hook_resid_pre": "hook_in",
        "hook_resid_mid": "ln2.hook_in",
        "hook_resid_post": "hook_out",
        "hook_attn_out": "attn.hook_out",
        "hook_mlp_out": "mlp.hook_out",
    }


class QKFlowArchitectureAdapter(ArchitectureAdapter):
    """Where TransformerLens finds the parts of a `QKFlowForCausalLM`."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self._set_rms_rotary_defaults()
        decoder = "model.decoder"
        self.component_mapping = {
            "embed": EmbeddingBridge(name=f"{decoder}.embedding"),
            "blocks": DecoderBlockBridge(
                name=f"{decoder}.blocks",
                submodules={
                    "ln1": RMSNormalizationBridge(name="attention_norm", config=self.cfg),
                    "attn": CoupledAttentionBridge("attention", self.cfg),
                    "ln2": RMSNormalizationBridge(name="feed_forward_norm", config=self.cfg),
                    "mlp": SublayerBridge("feed_forward", self.cfg),
                },
            ),
            "ln_final": RMSNormalizationBridge(name=f"{decoder}.norm", config=self.cfg),
            "unembed": UnembeddingBridge(name=f"{decoder}.head"),
        }

    def prepare_model(self, hf_model: QKFlowForCausalLM) -> None:
        """Give a model with tied embeddings an output matrix of its own, which TransformerLens needs."""
        decoder = hf_model.model.decoder
        if decoder.head is None:
            weight = decoder.embedding.weight
            vocab_size, dim = weight.shape
            decoder.head = nn.Linear(dim, vocab_size, bias=False, device="meta")
            decoder.head.weight = nn.Parameter(weight.detach().clone())


def open_bridge(source: str | Path) -> TransformerBridge:
    """Return a `TransformerBridge` of an exported folder."""
    from transformers import AutoModelForCausalLM

    model, tokenizer = load_transformers(str(source), AutoModelForCausalLM, "as a causal model")
    return bridge_model(model.eval(), tokenizer)


def bridge_model(model: QKFlowForCausalLM, tokenizer: Any = None) -> TransformerBridge:
    """Return a `TransformerBridge` around a model, which is changed in place."""
    ArchitectureAdapterFactory.register_adapter(ARCHITECTURE, QKFlowArchitectureAdapter)
    shape = model.config
    config = TransformerBridgeConfig(
        d_model=shape.hidden_size,
        d_head=shape.head_dim,
        n_layers=shape.num_hidden_layers,
        n_heads=shape.num_attention_heads,
        n_key_value_heads=shape.num_key_value_heads,
        n_ctx=shape.max_position_embeddings,
        d_vocab=shape.vocab_size,
        d_mlp=shape.intermediate_size,
        eps=shape.rms_norm_eps,
        architecture=ARCHITECTURE,
    )
    return build_bridge_from_module(model, ARCHITECTURE, tl_config=config, tokenizer=tokenizer)
