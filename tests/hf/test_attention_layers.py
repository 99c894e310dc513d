from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from families import SMALL, tiny
from input_errors import raises_code
from qkflow import hf
from qkflow.hf.attention_layers import find_attention_layers, fold_drift, linear_weight


def test_fold_drift() -> None:
    class Attention(nn.Module):
        head_dim, num_heads = 4, 4

        def __init__(self, query_bias: bool = True) -> None:
            super().__init__()
            self.q_proj, self.k_proj = nn.Linear(8, 16, bias=query_bias), nn.Linear(8, 8)

    layer = find_attention_layers(nn.Sequential(Attention()))[0]
    q, k = layer.module.q_proj, layer.module.k_proj
    x, amount = torch.randn(3, 8), torch.tensor([0.5, -1.0, 2.0, 0.0])
    with torch.no_grad():
        keys = k(x).view(3, 2, 4).repeat_interleave(2, 1)
        expected = (q(x).view(3, 4, 4) + amount[:, None] * keys).flatten(1)
        fold_drift(layer, amount)
        torch.testing.assert_close(q(x), expected)
    unbalanced = find_attention_layers(nn.Sequential(Attention(query_bias=False)))[0]
    with raises_code("key-bias-only"):
        fold_drift(unbalanced, amount)


def test_linear_weight_of_conv1d() -> None:
    c_attn = tiny("gpt2").transformer.h[0].attn.c_attn
    assert linear_weight(c_attn).shape == (192, 64)
    assert linear_weight(c_attn).data_ptr() == c_attn.weight.data_ptr()


TEXT = {**SMALL, "num_key_value_heads": 4, "num_hidden_layers": 4, "head_dim": 16, "eos_token_id": 2}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
EXPERTS = {"num_experts_per_tok": 1, "moe_intermediate_size": 32}
VISION = {"hidden_size": 64, "intermediate_size": 96}


def latent_text() -> Any:
    """A vision tower with standard attention and a text model with latent keys."""
    groups = {"n_routed_experts": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 16}
    text = transformers.DeepseekV3Config(**{**TEXT, "head_dim": 8}, **LATENT, **EXPERTS, **groups)
    vision = transformers.CLIPVisionConfig(
        **VISION, num_hidden_layers=2, num_attention_heads=4, patch_size=16
    )
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(text_config=text, vision_config=vision)
    )


def shared_keys() -> Any:
    kinds = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
    sizes = {"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 16, "laurel_rank": 8}
    config = transformers.Gemma3nTextConfig(**TEXT, **kinds, **sizes, activation_sparsity_pattern=None)
    return transformers.Gemma3nForCausalLM(config)


def linear_and_full() -> Any:
    model = tiny("llama", num_hidden_layers=3)
    model.model.layers[1].self_attn.q_conv1d = nn.Conv1d(64, 64, 4, groups=64)
    return model


@pytest.mark.parametrize(
    ("build", "left"),
    [
        (latent_text, "DeepseekV3Attention"),
        (shared_keys, "Gemma3nTextAttention"),
        (linear_and_full, "LlamaAttention"),
    ],
)
def test_unsupported_layers_need_explicit_selection(build: Any, left: str) -> None:
    model = build()
    with raises_code("unsupported-attention"):
        hf.attach(model)
    assert not hf.named_coupled_layers(model)
    assert len(hf.named_coupled_layers(hf.attach(model, layers=range(2)))) == 2


def test_linear_attention_is_not_found() -> None:
    kinds = {"layer_types": ["linear_attention", "full_attention"] * 2, "num_experts": 2}
    model = transformers.KimiLinearForCausalLM(
        transformers.KimiLinearConfig(**TEXT, **kinds, **LATENT, **EXPERTS)
    )
    with raises_code("no-attention-layers"):
        hf.attach(model)


def test_multimodal_model_is_coupled_in_its_text_part() -> None:
    sizes = {**VISION, "depth": 1, "num_heads": 4, "out_hidden_size": 64, "num_position_embeddings": 16}
    vision = {**sizes, "deepstack_visual_indexes": [0]}
    model = transformers.Qwen3VLModel(transformers.Qwen3VLConfig(text_config={**TEXT}, vision_config=vision))
    with raises_code("qkv-probe-failed"):
        hf.attach(model)
    assert not hf.named_coupled_layers(model)
    assert len(hf.named_coupled_layers(hf.attach(model, layers=[-1]))) == 1
    hf.detach(model)
    assert len(hf.named_coupled_layers(hf.attach(model.language_model))) == 4
