from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from families import FUSED, SMALL, tiny, token_ids
from qkflow import hf
from qkflow.attention.heads import HeadShapes
from qkflow.errors import InputError
from qkflow.hf.attention_layers import find_attention_layers, fold_drift, linear_weight
from qkflow.hf.qkv_layout import QKVLayout


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (6, 2), (3, 1)])
def test_a_layout_cuts_and_joins(grouped: bool, queries: int, keys: int) -> None:
    layout = QKVLayout(HeadShapes(queries, keys, keys, 5, 5, queries, 5), grouped)
    fused = torch.randn(2, 3, (queries + 2 * keys) * 5)
    q, k, v = layout.split(fused)
    assert q.shape == (2, 3, queries, 5)
    assert k.shape == v.shape == (2, 3, keys, 5)
    assert torch.equal(layout.fuse(q, k, v), fused)
    for part, rows in zip((q, k, v), layout.rows(), strict=True):
        assert torch.equal(part.flatten(-2), fused[..., rows])


@pytest.mark.parametrize(
    ("family", "grouped"),
    [
        ("gpt2", False),
        ("gpt_bigcode", True),  # the same name c_attn, cut in another way
        ("gpt_neox", True),
        ("falcon", True),
        ("phi3", False),
        ("modernbert", False),
    ],
)
def test_the_model_tells_how_its_fused_projection_is_cut(family: str, grouped: bool) -> None:
    model = tiny(family).train()
    sites = find_attention_layers(model)
    assert all(site.layout is not None and site.layout.interleaved is grouped for site in sites)
    assert all(module.training for module in model.modules()), "asking leaves no trace"


@pytest.mark.parametrize("family", FUSED)
def test_fused_queries_are_the_ones_other_tokens_never_read(family: str) -> None:
    """Checked through the whole layer by gradients, independently of how the layout was found."""
    model = tiny(family)
    site = find_attention_layers(model)[0]
    kept: dict[str, torch.Tensor] = {}

    def keep(_: nn.Module, __: object, out: torch.Tensor) -> torch.Tensor:
        kept["fused"] = out.detach().requires_grad_()
        return kept["fused"]

    def read(_: nn.Module, __: object, out: object) -> None:
        kept["out"] = out if isinstance(out, torch.Tensor) else out[0]

    site.module.get_submodule(site.q_name).register_forward_hook(keep)
    site.module.register_forward_hook(read)
    model(input_ids=token_ids(1, 4))
    kept["out"][:, -1].square().sum().backward()
    first = kept["fused"].grad[0, 0]
    q, k, v = site.layout.rows()
    assert not first[q].any()
    assert (first[k] != 0).float().mean() > 0.9
    assert (first[v] != 0).float().mean() > 0.9


def test_a_model_that_cannot_be_run_is_refused_where_it_must_be() -> None:
    class Attention(nn.Module):
        head_dim, num_heads = 4, 2

        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

    with pytest.raises(InputError, match=r"could not be run on 2 tokens to learn how it is cut"):
        _ = find_attention_layers(nn.Sequential(Attention()))[0].layout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.0, 50.0])
def test_no_weights_hide_how_a_fused_projection_is_cut(scale: float, dtype: torch.dtype) -> None:
    """Neither an output projection that starts at zero nor attention that sees one token alone."""
    model = tiny("gpt2")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attn.c_proj" in name or (scale and "attn." in name):
                parameter.mul_(scale)
    assert not any(site.layout.interleaved for site in find_attention_layers(model.to(dtype)))


def test_layouts_are_asked_of_the_layers_that_need_them() -> None:
    class Unread(nn.Module):
        head_dim, num_heads = 16, 4

        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(64, 192)

    model = tiny("gpt2")
    model.vision = Unread()
    first, *_, unread = find_attention_layers(model)
    assert not first.layout.interleaved
    with pytest.raises(InputError, match=r"'vision' is never run when.*e.g. model.transformer"):
        _ = unread.layout


def test_a_drift_folds_into_weights_and_biases() -> None:
    class Attention(nn.Module):
        head_dim, num_heads = 4, 4

        def __init__(self, query_bias: bool = True) -> None:
            super().__init__()
            self.q_proj, self.k_proj = nn.Linear(8, 16, bias=query_bias), nn.Linear(8, 8)

    site = find_attention_layers(nn.Sequential(Attention()))[0]
    q, k = site.module.q_proj, site.module.k_proj
    x, amount = torch.randn(3, 8), torch.tensor([0.5, -1.0, 2.0, 0.0])
    with torch.no_grad():
        keys = k(x).view(3, 2, 4).repeat_interleave(2, 1)
        expected = (q(x).view(3, 4, 4) + amount[:, None] * keys).flatten(1)
        fold_drift(site, amount)
        torch.testing.assert_close(q(x), expected)
    unbalanced = find_attention_layers(nn.Sequential(Attention(query_bias=False)))[0]
    with pytest.raises(InputError, match=r"keys have a bias and queries none"):
        fold_drift(unbalanced, amount)


def test_weights_come_outputs_first() -> None:
    c_attn = tiny("gpt2").transformer.h[0].attn.c_attn
    assert linear_weight(c_attn).shape == (192, 64)
    assert linear_weight(c_attn).data_ptr() == c_attn.weight.data_ptr()


TEXT = {**SMALL, "num_key_value_heads": 4, "num_hidden_layers": 4, "head_dim": 16, "eos_token_id": 2}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
EXPERTS = {"num_experts_per_tok": 1, "moe_intermediate_size": 32}
VISION = {"hidden_size": 64, "intermediate_size": 96}


def latent_text() -> Any:
    """Sees with attention as usual, reads with latent keys."""
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
def test_layers_that_cannot_be_coupled_are_not_skipped_in_silence(build: Any, left: str) -> None:
    model = build()
    with pytest.raises(InputError, match=rf"\({left}\).*cannot be coupled.*chooses among the 2 attention"):
        hf.attach(model)
    assert not hf.named_coupled_layers(model)
    assert len(hf.named_coupled_layers(hf.attach(model, layers=range(2)))) == 2


def test_linear_attention_is_not_taken_for_attention() -> None:
    kinds = {"layer_types": ["linear_attention", "full_attention"] * 2, "num_experts": 2}
    model = transformers.KimiLinearForCausalLM(
        transformers.KimiLinearConfig(**TEXT, **kinds, **LATENT, **EXPERTS)
    )
    with pytest.raises(InputError, match=r"no self-attention.*found in KimiLinearForCausalLM"):
        hf.attach(model)


def test_a_model_that_also_sees_is_coupled_where_it_reads() -> None:
    sizes = {**VISION, "depth": 1, "num_heads": 4, "out_hidden_size": 64, "num_position_embeddings": 16}
    vision = {**sizes, "deepstack_visual_indexes": [0]}
    model = transformers.Qwen3VLModel(transformers.Qwen3VLConfig(text_config={**TEXT}, vision_config=vision))
    with pytest.raises(InputError, match=r"'visual.blocks.0.attn' is never run.*e.g. model.language_model"):
        hf.attach(model)
    assert not hf.named_coupled_layers(model)
    assert len(hf.named_coupled_layers(hf.attach(model, layers=[-1]))) == 1
    hf.detach(model)
    assert len(hf.named_coupled_layers(hf.attach(model.language_model))) == 4
