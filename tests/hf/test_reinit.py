from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from families import FAMILIES, FUSED, GROUPED, output, tiny, token_ids
from input_errors import raises_code
from qkflow import hf
from qkflow.attention.init import InitScheme, ParamSampler
from qkflow.attention.projections import FactorizedOV, FactorizedQK
from qkflow.hf.attention_layers import AttentionLayer, find_attention_layers, linear_weight
from qkflow.hf.parameter_roles import infer_parameter_roles


def projection(layer: AttentionLayer, part: str) -> torch.Tensor:
    name = {"q": layer.q_name, "k": layer.k_name, "v": layer.v_name}[part]
    assert name is not None
    return linear_weight(layer.module.get_submodule(name))[layer.rows(part)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("init", ["gpt2", "symmetric=1", "gpt2{qk=fan_in,out=modern}+tied_qk"])
def test_families(family: str, init: str) -> None:
    model, again = tiny(family), tiny(family)
    changes = hf.reinitialize(model, init, seed=3)
    hf.reinitialize(again, init, seed=3)
    roles = infer_parameter_roles(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    matrices = {name for name, p in model.named_parameters() if p.dim() > 1}
    assert matrices <= {change.name for change in changes}, "every matrix was reinitialized"
    assert not any(roles[change.name] in ("norm", "qk_norm") for change in changes)
    assert torch.isfinite(output(model, token_ids())).all()
    for layer in find_attention_layers(model):
        qk = FactorizedQK(64, layer.heads, bias=False)
        with torch.no_grad():
            qk.init_parameters(ParamSampler(InitScheme.parse(init), 3, 2, layer.name))
        assert torch.equal(projection(layer, "q"), qk.q.weight)
        assert torch.equal(projection(layer, "k"), qk.k.weight)


def test_standard_deviations() -> None:
    model = tiny("llama", hidden_size=128, intermediate_size=256, tie_word_embeddings=True)
    after = {change.name: change.std_after for change in hf.reinitialize(model, "gpt2", seed=0)}
    for name, expected in {
        "model.embed_tokens.weight": 0.02,
        "model.layers.0.self_attn.q_proj.weight": 0.02,
        "model.layers.0.mlp.up_proj.weight": 0.02,
        "model.layers.0.mlp.down_proj.weight": 0.02 / 4**0.5,
        "model.layers.1.self_attn.o_proj.weight": 0.02 / 4**0.5,
    }.items():
        assert after[name] == pytest.approx(expected, rel=0.05), name
    after = {change.name: change.std_after for change in hf.reinitialize(model, "fan_in", seed=0)}
    for name, fan_in in {
        "model.embed_tokens.weight": 128,
        "model.layers.0.self_attn.q_proj.weight": 128,
        "model.layers.0.mlp.down_proj.weight": 256,
    }.items():
        assert after[name] == pytest.approx(0.7 / fan_in**0.5, rel=0.05), name


@pytest.mark.parametrize("tied", [True, False])
def test_modern_residual_outputs_and_head(tied: bool) -> None:
    model = tiny("llama", hidden_size=128, intermediate_size=256, tie_word_embeddings=tied)
    after = {change.name: change.std_after for change in hf.reinitialize(model, "modern{head=zero}", seed=0)}
    for name, expected in {
        "model.embed_tokens.weight": 0.6 / 128**0.5,
        "model.layers.0.self_attn.q_proj.weight": 0.6 / 128**0.5,
        "model.layers.0.mlp.gate_proj.weight": 0.6 / 128**0.5,
        "model.layers.0.mlp.down_proj.weight": 0.0,
        "model.layers.1.self_attn.o_proj.weight": 0.0,
        **({} if tied else {"lm_head.weight": 0.0}),
    }.items():
        assert after[name] == pytest.approx(expected, rel=0.05), name


def test_modern_keeps_a_classifier() -> None:
    model = transformers.LlamaForSequenceClassification(tiny("llama").config)
    after = {change.name: change.std_after for change in hf.reinitialize(model, "modern", seed=0)}
    assert after["score.weight"] > 0
    assert after["model.embed_tokens.weight"] == pytest.approx(0.6 / 64**0.5, rel=0.1)


WIDE: dict[str, Any] = {**GROUPED, "hidden_size": 256, "num_hidden_layers": 1, "num_experts_per_tok": 1}


@pytest.mark.parametrize("transposed", [False, True])
def test_expert_fan_in(transposed: bool) -> None:
    if transposed:
        config = transformers.GptOssConfig(
            **{**WIDE, "intermediate_size": 32}, head_dim=16, num_local_experts=4
        )
        model = transformers.GptOssForCausalLM(config)
        with raises_code("unknown-parameter-role"):
            hf.reinitialize(model)
    else:
        model = transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(**WIDE, moe_intermediate_size=32, num_experts=4)
        )
    changes = hf.reinitialize(model, "fan_in", seed=0, roles={"*sinks": "scoring"} if transposed else None)
    after = {change.name.rpartition(".mlp.")[2]: change.std_after for change in changes}
    router = "router.weight" if transposed else "gate.weight"
    assert after[router] == pytest.approx(0.7 / 256**0.5, rel=0.1)
    assert after["experts.gate_up_proj"] == pytest.approx(0.7 / 256**0.5, rel=0.05)
    assert after["experts.down_proj"] == pytest.approx(0.7 / 32**0.5, rel=0.05)
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith("bias"))


def test_activation_parameters_keep_their_init() -> None:
    model = transformers.ApertusForCausalLM(transformers.ApertusConfig(**GROUPED))
    activation = model.model.layers[0].mlp.act_fn
    before = activation.alpha_p.clone(), activation.alpha_n.clone()
    assert before[0].any()
    hf.reinitialize(model, "gpt2", seed=0)
    assert (activation.alpha_p, activation.alpha_n) == before


def test_expert_biases_are_zero() -> None:
    options = {
        **WIDE,
        "moe_num_experts": 4,
        "moe_k": 1,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": 0,
    }
    model = transformers.Ernie4_5_MoeForCausalLM(transformers.Ernie4_5_MoeConfig(**options))
    hf.reinitialize(model, "gpt2", seed=0)
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    assert any(bias.dim() == 2 for bias in biases)
    assert not any(bias.any() for bias in biases)


def test_convolution_fan_in() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**sizes, image_size=32, patch_size=8))
    after = {change.name: change.std_after for change in hf.reinitialize(model, "fan_in", seed=0)}
    name = next(name for name in after if name.endswith("patch_embedding.weight"))
    assert after[name] == pytest.approx(0.7 / (3 * 8 * 8) ** 0.5, rel=0.05)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_mimetic_init_of_both_circuits(family: str) -> None:
    model = tiny(family)
    hf.reinitialize(model, "mimetic", seed=1)
    layer = find_attention_layers(model)[0]
    ov = FactorizedOV(64, layer.heads, bias=False)
    with torch.no_grad():
        ov.init_parameters(ParamSampler(InitScheme.parse("mimetic"), 1, 2, layer.name))
    assert torch.equal(projection(layer, "v"), ov.v.weight)
    output_layer = {"llama": "o_proj", "gpt2": "c_proj"}.get(family)
    o = (
        model.get_submodule("bert.encoder.layer.0.attention.output.dense")
        if output_layer is None
        else layer.module.get_submodule(output_layer)
    )
    assert torch.equal(linear_weight(o), ov.o.weight)


def test_symmetric_init_is_a_merged_drift() -> None:
    family = FUSED[0]
    symmetric, drifting = tiny(family), tiny(family)
    hf.reinitialize(symmetric, "fan_in+symmetric=0.5", seed=2)
    hf.reinitialize(drifting, "fan_in", seed=2)
    hf.merge(hf.attach(drifting, "drift", step=0.5))
    torch.testing.assert_close(output(symmetric, token_ids()), output(drifting, token_ids()))


def test_padding_embedding_is_zero() -> None:
    model = tiny("llama")
    hf.reinitialize(model, "gpt2", seed=0)
    assert not model.model.embed_tokens.weight[0].any()


def test_unknown_init_is_refused() -> None:
    with raises_code("unknown-init"):
        hf.reinitialize(tiny("llama"), "gtp2")


def test_reinitialize_releases_prepared_layers() -> None:
    model: Any = hf.prepare_for_inference(hf.attach(tiny("llama").eval(), "euler", seed=0))
    hf.reinitialize(model, "fan_in", seed=1)
    assert all(layer.prepared_qk is None for _, layer in hf.named_coupled_layers(model))
