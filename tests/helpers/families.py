"""Tiny untrained models of many `transformers` families."""

from __future__ import annotations

from typing import Any

import torch
import transformers
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
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, GROUPED),
    "mistral": (transformers.MistralForCausalLM, transformers.MistralConfig, GROUPED),
    "mixtral": (
        transformers.MixtralForCausalLM,
        transformers.MixtralConfig,
        {**GROUPED, "num_local_experts": 2},
    ),
    "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config, GROUPED),
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config, {**GROUPED, "head_dim": 32}),
    "gemma": (transformers.GemmaForCausalLM, transformers.GemmaConfig, {**GROUPED, "head_dim": 32}),
    "gemma2": (transformers.Gemma2ForCausalLM, transformers.Gemma2Config, {**GROUPED, "head_dim": 16}),
    "gemma3": (transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig, {**GROUPED, "head_dim": 16}),
    "olmo2": (transformers.Olmo2ForCausalLM, transformers.Olmo2Config, GROUPED),
    "phi": (transformers.PhiForCausalLM, transformers.PhiConfig, SMALL),
    "phi3": (transformers.Phi3ForCausalLM, transformers.Phi3Config, GROUPED),
    "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config, GPT),
    "gpt_neox": (transformers.GPTNeoXForCausalLM, transformers.GPTNeoXConfig, SMALL),
    "gptj": (transformers.GPTJForCausalLM, transformers.GPTJConfig, {**GPT, "rotary_dim": 8}),
    "opt": (
        transformers.OPTForCausalLM,
        transformers.OPTConfig,
        {**SMALL, "ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 64},
    ),
    "bloom": (transformers.BloomForCausalLM, transformers.BloomConfig, {**GPT, "hidden_size": 64}),
    "falcon": (
        transformers.FalconForCausalLM,
        transformers.FalconConfig,
        {**SMALL, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "gpt_bigcode": (
        transformers.GPTBigCodeForCausalLM,
        transformers.GPTBigCodeConfig,
        {**GPT, "multi_query": False},
    ),
    "bert": (transformers.BertForMaskedLM, transformers.BertConfig, SMALL),
    "roberta": (transformers.RobertaForMaskedLM, transformers.RobertaConfig, SMALL),
    "distilbert": (
        transformers.DistilBertForMaskedLM,
        transformers.DistilBertConfig,
        {"vocab_size": 96, "dim": 64, "n_heads": 4, "n_layers": 2, "hidden_dim": 96},
    ),
    "modernbert": (
        transformers.ModernBertForMaskedLM,
        transformers.ModernBertConfig,
        {**SMALL, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "t5_encoder": (
        transformers.T5EncoderModel,
        transformers.T5Config,
        {"vocab_size": 96, "d_model": 64, "d_kv": 16, "num_heads": 4, "num_layers": 2, "d_ff": 96},
    ),
}
FUSED = ("phi3", "gpt2", "gpt_neox", "bloom", "falcon", "gpt_bigcode", "modernbert")
BIDIRECTIONAL = ("bert", "roberta", "distilbert", "modernbert", "t5_encoder")

DECODER: dict[str, Any] = {
    "vocab_size": 96,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
# encoder-decoder family -> (model class, config class, config)
SEQ2SEQ: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "t5": (
        transformers.T5ForConditionalGeneration,
        transformers.T5Config,
        {**FAMILIES["t5_encoder"][2], "decoder_start_token_id": 0, "eos_token_id": 2},
    ),
    "bart": (transformers.BartForConditionalGeneration, transformers.BartConfig, DECODER),
    "whisper": (
        transformers.WhisperForConditionalGeneration,
        transformers.WhisperConfig,
        {**DECODER, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32},
    ),
}


def tiny(family: str, **changes: Any) -> Any:
    """Return an untrained model of a family in eval mode, with the same weights at every call."""
    torch.manual_seed(0)
    model, config, options = FAMILIES[family]
    return model(config(**{**options, **changes})).eval()


def seq2seq(family: str) -> Any:
    """Return an untrained encoder-decoder model in eval mode, with the same weights at every call."""
    torch.manual_seed(0)
    model, config, options = SEQ2SEQ[family]
    return model(config(**options)).eval()


def seq2seq_inputs(family: str) -> dict[str, Tensor]:
    """Return inputs of its encoder: token ids, or mel spectrograms (B, bins, frames)."""
    if family == "whisper":
        return {"input_features": torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1))}
    return {"input_ids": token_ids(2, 7)}


def token_ids(batch: int = 2, length: int = 9) -> Tensor:
    return torch.randint(3, 96, (batch, length), generator=torch.Generator().manual_seed(1))


def output(model: Any, ids: Tensor) -> Tensor:
    """Return the logits, or the last hidden state of a model without a head."""
    with torch.no_grad():
        out = model(input_ids=ids)
    return out.logits if "logits" in out else out.last_hidden_state


def disturb(model: torch.nn.Module, amount: float = 0.3) -> None:
    """Add noise to the weights of couplings, so that they differ from the identity."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".coupling." in name:
                parameter.add_(amount * torch.randn(parameter.shape, generator=generator))
