"""The peer of a qkflow decoder in `transformers`: a Llama of the same shape with the same weights."""

from __future__ import annotations

from typing import Any

import torch

from qkflow.models import Decoder, ModelConfig

NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "attention.qk.q": "self_attn.q_proj",
    "attention.qk.k": "self_attn.k_proj",
    "attention.ov.v": "self_attn.v_proj",
    "attention.ov.o": "self_attn.o_proj",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}


def llama(model: Decoder, length: int) -> Any:
    """A LlamaForCausalLM that computes what `model` computes, which is checked."""
    from transformers import LlamaForCausalLM

    peer = LlamaForCausalLM(_config(model.config, length))
    weights = {}
    for name, tensor in model.state_dict().items():
        prefix, part = "", name.removesuffix(".weight")
        if part.startswith("blocks."):
            _, number, part = part.split(".", 2)
            prefix = f"model.layers.{number}."
        weights[f"{prefix}{NAMES[part]}.weight"] = tensor
    unknown = peer.load_state_dict(weights, strict=False).unexpected_keys
    assert not unknown, unknown
    ids = torch.randint(model.config.vocab_size, (2, min(16, length)))
    with torch.no_grad():
        mine, theirs = model.logits(model(ids)), peer(input_ids=ids).logits
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    return peer


def _config(config: ModelConfig, length: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.resolved_hidden_dim,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        tie_word_embeddings=True,
        max_position_embeddings=length,
        rms_norm_eps=config.norm_eps,
    )
