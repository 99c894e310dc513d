"""Convert qkflow decoders to `transformers` models and back; outputs stay the same.

`to_transformers` wraps a decoder in the qkflow architecture and shares its weights. `to_llama` converts a
decoder with standard attention to a plain Llama, `from_llama` back. Llama uses the same order of heads and
rotary dimensions, so these conversions only rename tensors.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from qkflow.attention.attention import merge
from qkflow.attention.rope import RotaryEmbedding
from qkflow.errors import InputError, unknown
from qkflow.hf.modeling import QKFlowConfig, QKFlowForCausalLM, QKFlowModel
from qkflow.models import AttentionConfig, Decoder, ModelConfig

# parameter names here and in Llama: outside the blocks, and within one
TOP_LEVEL_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
}
BLOCK_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.qk.q": "self_attn.q_proj",
    "attention.qk.k": "self_attn.k_proj",
    "attention.ov.v": "self_attn.v_proj",
    "attention.ov.o": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}


def to_transformers(model: Decoder, **config_kwargs: Any) -> QKFlowForCausalLM:
    """Wrap a decoder in the `transformers` architecture, sharing its weights.

    config_kwargs   further fields of `QKFlowConfig`, e.g. `eos_token_id`
    """
    with torch.device("meta"):
        wrapped = QKFlowForCausalLM(QKFlowConfig(shape=model.config.to_dict(), **config_kwargs))
    wrapped.model.decoder = model
    return wrapped.train(model.training)


def from_transformers(model: nn.Module) -> Decoder:
    """Return the decoder inside a model of the qkflow architecture, or convert a Llama."""
    for module in model.modules():
        if isinstance(module, QKFlowModel):
            return module.decoder
    if isinstance(model, LlamaForCausalLM):
        return from_llama(model)
    raise InputError(
        f"cannot convert a {type(model).__name__}: only qkflow models and Llamas convert",
        code="unsupported-architecture",
    )


def to_llama(model: Decoder, **config_kwargs: Any) -> LlamaForCausalLM:
    """Convert a decoder with standard attention to a plain Llama; linear couplings (`drift`) are merged."""
    if any(module.coupling.linear_drift() is not None for module in _attention_modules(model)):
        model = merge(copy.deepcopy(model))  # type: ignore[assignment]
    _check_llama_compatible(model)
    shape = model.config
    attention = shape.attention
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.dim,
            intermediate_size=shape.resolved_hidden_dim,
            num_hidden_layers=shape.n_layers,
            num_attention_heads=shape.n_heads,
            num_key_value_heads=shape.n_kv_heads or shape.n_heads,
            head_dim=shape.head_dim or shape.dim // shape.n_heads,
            rms_norm_eps=shape.norm_eps,
            tie_word_embeddings=shape.tie_embeddings,
            attention_bias=attention.bias,
            attention_dropout=attention.dropout,
            rope_parameters=_rope_to_llama(model),
            **{"bos_token_id": None, "eos_token_id": None, **config_kwargs},
        )
    )
    names = _llama_names(shape.n_layers)
    state = {_rename(name, names): value for name, value in model.state_dict().items()}
    if shape.tie_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    llama.load_state_dict(state)
    return llama.to(model.output_weight.dtype).train(model.training)


def from_llama(model: LlamaForCausalLM) -> Decoder:
    """Convert a Llama to a decoder with a copy of its weights."""
    config = model.config
    if getattr(config, "quantization_config", None) is not None:
        raise InputError(
            "cannot convert a quantized Llama: convert the unquantized model", code="quantized-model"
        )
    if config.hidden_act != "silu" or config.mlp_bias:
        raise InputError(
            f"cannot convert a Llama with hidden_act='{config.hidden_act}' and mlp_bias={config.mlp_bias}: "
            "only 'silu' and False convert",
            code="unsupported-architecture",
        )
    shape = ModelConfig(
        vocab_size=config.vocab_size,
        n_layers=config.num_hidden_layers,
        dim=config.hidden_size,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        feed_forward="swiglu",
        hidden_dim=config.intermediate_size,
        tie_embeddings=config.tie_word_embeddings,
        norm_eps=config.rms_norm_eps,
        attention=AttentionConfig(
            bias=config.attention_bias,
            dropout=config.attention_dropout or 0.0,
            rope=_rope_from_llama(config.rope_parameters),
        ),
    )
    names = {llama_name: name for name, llama_name in _llama_names(shape.n_layers).items()}
    state = {_rename(name, names): value.clone() for name, value in model.state_dict().items()}
    if shape.tie_embeddings:
        state.pop("head.weight", None)
    decoder = Decoder(shape, device="meta").to_empty(device=model.device)
    decoder.load_state_dict(state, assign=True)
    return decoder.train(model.training)


def _attention_modules(model: Decoder) -> list[Any]:
    return [block.attention for block in model.blocks]


def _check_llama_compatible(model: Decoder) -> None:
    shape, attention = model.config, model.config.attention
    differences = {
        f"the coupling '{_attention_modules(model)[0].coupling_spec}'": any(
            layer.coupling_spec.name != "none" for layer in _attention_modules(model)
        ),
        f"'{attention.scoring}' scoring": attention.scoring != "softmax",
        f"the collapsed circuit '{attention.circuit}'": attention.circuit != "FAFO",
        "query-key norms": attention.qk_norm and attention.qk_norm_gain == "learned",
        "query-key norms with a fixed gain": attention.qk_norm_gain != "learned",
        "a window": attention.window is not None,
        "no rotary embedding": _attention_modules(model)[0].rope is None,
        "an embedding norm": shape.embedding_norm,
        "a logit softcap": shape.logit_softcap is not None,
        "a GELU feed-forward": shape.feed_forward != "swiglu",
        "a slow path": shape.slow is not None,
        "bidirectional attention": not shape.causal,
    }
    present = [feature for feature, differs in differences.items() if differs]
    if present:
        raise InputError(
            f"a Llama cannot have {', '.join(present)}: convert to the qkflow architecture instead "
            "(hf.to_transformers, or `qkflow export --to qkflow`)",
            code="not-a-llama",
        )


def _llama_names(n_layers: int) -> dict[str, str]:
    blocks = {
        f"blocks.{layer}.{name}": f"model.layers.{layer}.{llama_name}"
        for layer in range(n_layers)
        for name, llama_name in BLOCK_NAMES.items()
    }
    return {**TOP_LEVEL_NAMES, **blocks}


def _rename(name: str, names: dict[str, str]) -> str:
    module, _, tensor = name.rpartition(".")
    if module not in names:
        raise InputError(
            f"cannot convert the weight '{name}': the other model has none like it",
            code="unsupported-architecture",
        )
    return f"{names[module]}.{tensor}"


def _rope_to_llama(model: Decoder) -> dict[str, Any]:
    rope: RotaryEmbedding = _attention_modules(model)[0].rope
    head_dim = _attention_modules(model)[0].head_shapes.head_dim
    if rope.scaling == "linear":
        return {"rope_type": "linear", "rope_theta": rope.base, "factor": rope.factor}
    if rope.scaling == "llama3":
        return {
            "rope_type": "llama3",
            "rope_theta": rope.base,
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position_embeddings,
        }
    base = rope.base * (rope.factor ** (head_dim / max(head_dim - 2, 1)) if rope.scaling == "ntk" else 1.0)
    return {"rope_type": "default", "rope_theta": base}


def _rope_from_llama(rope: dict[str, Any]) -> dict[str, Any]:
    kind, base = rope.get("rope_type", "default"), float(rope["rope_theta"])
    if kind == "default":
        return {"base": base}
    if kind == "linear":
        return {"base": base, "scaling": "linear", "factor": float(rope["factor"])}
    if kind == "llama3":
        return {
            "base": base,
            "scaling": "llama3",
            "factor": float(rope["factor"]),
            "low_freq_factor": float(rope["low_freq_factor"]),
            "high_freq_factor": float(rope["high_freq_factor"]),
            "original_max_position_embeddings": int(rope["original_max_position_embeddings"]),
        }
    raise unknown("rope_type", kind, ("default", "linear", "llama3"))
