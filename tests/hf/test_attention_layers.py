from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from families import FUSED, SMALL, tiny, token_ids
from input_errors import raises_code
from qkflow import hf
from qkflow.attention.projections import HeadShapes
from qkflow.hf.attention_layers import find_attention_layers, fold_drift, linear_weight
from qkflow.hf.qkv_layout import QKVLayout


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (6, 2), (3, 1)])
def test_layout_split_and_fuse(interleaved: bool, queries: int, keys: int) -> None:
    layout = QKVLayout(HeadShapes(queries, keys, keys, 5, 5, queries, 5), interleaved)
    fused = torch.randn(2, 3, (queries + 2 * keys) * 5)
    q, k, v = layout.split(fused)
    assert q.shape == (2, 3, queries, 5)
    assert k.shape == v.shape == (2, 3, keys, 5)
    assert torch.equal(layout.fuse(q, k, v), fused)
    for part, rows in zip((q, k, v), layout.rows(), strict=True):
        assert torch.equal(part.flatten(-2), fused[..., rows])


@pytest.mark.parametrize(
    ("family", "interleaved"),
    [
        ("gpt2", False),
        ("gpt_bigcode", True),  # the same name c_attn, another column order
        ("gpt_neox", True),
        ("falcon", True),
        ("phi3", False),
        ("modernbert", False),
    ],
)
def test_infer_layout(family: str, interleaved: bool) -> None:
    model = tiny(family).train()
    layers = find_attention_layers(model)
    assert all(layer.layout is not None and layer.layout.interleaved is interleaved for layer in layers)
    assert all(module.training for module in model.modules()), "train mode is restored"


@pytest.mark.parametrize("family", FUSED)
def test_layout_matches_gradients(family: str) -> None:
    """Gradients of the last token: zero for other queries, nonzero for keys and values."""
    model = tiny(family)
    layer = find_attention_layers(model)[0]
    captured: dict[str, torch.Tensor] = {}

    def replace(_: nn.Module, __: object, out: torch.Tensor) -> torch.Tensor:
        captured["fused"] = out.detach().requires_grad_()
        return captured["fused"]

    def read(_: nn.Module, __: object, out: object) -> None:
        captured["out"] = out if isinstance(out, torch.Tensor) else out[0]

    layer.module.get_submodule(layer.q_name).register_forward_hook(replace)
    layer.module.register_forward_hook(read)
    model(input_ids=token_ids(1, 4))
    captured["out"][:, -1].square().sum().backward()
    first = captured["fused"].grad[0, 0]
    q, k, v = layer.layout.rows()
    assert not first[q].any()
    assert (first[k] != 0).float().mean() > 0.9
    assert (first[v] != 0).float().mean() > 0.9


def test_layout_of_a_model_that_fails() -> None:
    class Attention(nn.Module):
        head_dim, num_heads = 4, 2

        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

    with raises_code("qkv-probe-failed"):
        _ = find_attention_layers(nn.Sequential(Attention()))[0].layout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.0, 50.0])
def test_infer_layout_for_any_weights(scale: float, dtype: torch.dtype) -> None:
    """Neither a zero output projection nor saturated attention hides the layout."""
    model = tiny("gpt2")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attn.c_proj" in name or (scale and "attn." in name):
                parameter.mul_(scale)
    assert not any(layer.layout.interleaved for layer in find_attention_layers(model.to(dtype)))


def test_layout_is_inferred_lazily() -> None:
    class Unread(nn.Module):
        head_dim, num_heads = 16, 4

        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(64, 192)

    model = tiny("gpt2")
    model.vision = Unread()
    first, *_, unread = find_attention_layers(model)
    assert not first.layout.interleaved
    with raises_code("qkv-probe-failed"):
        _ = unread.layout


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
