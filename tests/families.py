"""Tiny fresh models of many `transformers` families."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import Tensor

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GROUPED: dict[str, Any] = {**SMALL, "num_key_value_heads": 2}
GPT: dict[str, Any] = {
    "vocab_size": 96,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 2,
    "bos_token_id": 1,
    "eos_token_id": None,
}

# family -> (model class, config class, config)
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, GROUPED),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig, GROUPED),
    "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig, {**GROUPED, "num_local_experts": 2}),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config, GROUPED),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, {**GROUPED, "head_dim": 32}),
    "gemma": (hf.GemmaForCausalLM, hf.GemmaConfig, {**GROUPED, "head_dim": 32}),
    "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config, {**GROUPED, "head_dim": 16}),
    "gemma3": (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, {**GROUPED, "head_dim": 16}),
    "olmo2": (hf.Olmo2ForCausalLM, hf.Olmo2Config, GROUPED),
    "phi": (hf.PhiForCausalLM, hf.PhiConfig, SMALL),
    "phi3": (hf.Phi3ForCausalLM, hf.Phi3Config, GROUPED),
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config, GPT),
    "gpt_neox": (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, SMALL),
    "gptj": (hf.GPTJForCausalLM, hf.GPTJConfig, {**GPT, "rotary_dim": 8}),
    "opt": (
        hf.OPTForCausalLM,
        hf.OPTConfig,
        {**SMALL, "ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 64},
    ),
    "bloom": (hf.BloomForCausalLM, hf.BloomConfig, {**GPT, "hidden_size": 64}),
    "falcon": (
        hf.FalconForCausalLM,
        hf.FalconConfig,
        {**SMALL, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "gpt_bigcode": (hf.GPTBigCodeForCausalLM, hf.GPTBigCodeConfig, {**GPT, "multi_query": False}),
    "bert": (hf.BertForMaskedLM, hf.BertConfig, SMALL),
    "roberta": (hf.RobertaForMaskedLM, hf.RobertaConfig, SMALL),
    "distilbert": (
        hf.DistilBertForMaskedLM,
        hf.DistilBertConfig,
        {"vocab_size": 96, "dim": 64, "n_heads": 4, "n_layers": 2, "hidden_dim": 96},
    ),
    "modernbert": (
        hf.ModernBertForMaskedLM,
        hf.ModernBertConfig,
        {**SMALL, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "t5_encoder": (
        hf.T5EncoderModel,
        hf.T5Config,
        {"vocab_size": 96, "d_model": 64, "d_kv": 16, "num_heads": 4, "num_layers": 2, "d_ff": 96},
    ),
}
FUSED = ("phi3", "gpt2", "gpt_neox", "bloom", "falcon", "gpt_bigcode", "modernbert")
BIDIRECTIONAL = ("bert", "roberta", "distilbert", "modernbert", "t5_encoder")


def tiny(family: str, **changes: Any) -> Any:
    """A fresh model of a family, in evaluation mode, the same at every call."""
    torch.manual_seed(0)
    model, config, options = FAMILIES[family]
    return model(config(**{**options, **changes})).eval()


def token_ids(batch: int = 2, length: int = 9) -> Tensor:
    return torch.randint(3, 96, (batch, length), generator=torch.Generator().manual_seed(1))


def output(model: Any, ids: Tensor) -> Tensor:
    """Logits, or the last hidden state of a model without a head."""
    with torch.no_grad():
        found = model(input_ids=ids)
    return found.logits if "logits" in found else found.last_hidden_state


def disturb(model: torch.nn.Module, amount: float = 0.3) -> None:
    """Move couplings away from their start, so that they do something."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".coupling." in name:
                parameter.add_(amount * torch.randn(parameter.shape, generator=generator))
