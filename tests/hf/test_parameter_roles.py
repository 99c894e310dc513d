from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from families import FAMILIES, FUSED, output, tiny, token_ids
from input_errors import raises_code
from qkflow import hf
from qkflow.hf.attention_layers import find_attention_layers
from qkflow.hf.parameter_roles import describe_param_groups
from qkflow.models import PRESETS, Decoder, preset


def check_each_parameter_once(model: nn.Module, groups: list[dict[str, Any]]) -> None:
    """Assert that every parameter is in exactly one group, under its own name."""
    params = [p for group in groups for p in group["params"]]
    names = [name for group in groups for name in group["names"]]
    assert sorted(map(id, params)) == sorted(map(id, model.parameters()))
    assert all(model.get_parameter(name) is p for name, p in zip(names, params, strict=True))


def rates(groups: list[dict[str, Any]]) -> dict[str, float]:
    return {name: group["lr"] for group in groups for name in group["names"]}


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    attention = {"coupling": "euler", "qk_norm": True, "bias": True}
    model = Decoder(preset(name, attention=attention, n_layers=2), device="meta")
    groups = hf.param_groups(model, 1e-3, ratio=20, weight_decay=0.1)
    check_each_parameter_once(model, groups)
    fast = {name for name, rate in rates(groups).items() if rate == pytest.approx(2e-2)}
    assert fast == {
        f"blocks.{layer}.attention.qk.{part}.{tensor}"
        for layer in (0, 1)
        for part in "qk"
        for tensor in ("weight", "bias")
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    model = tiny(family)
    before, keys = output(model, token_ids()), set(model.state_dict())
    groups = hf.param_groups(model, 1e-3, ratio=20, weight_decay=0.1)
    check_each_parameter_once(model, groups)
    assert {group["name"] for group in groups} == {"qk", "embed", "rest"}
    assert torch.equal(output(model, token_ids()), before)
    assert set(model.state_dict()) == keys
    roles = hf.infer_parameter_roles(model)
    counted = {part: sum(role == part for role in roles.values()) for part in "qkv"}
    assert counted["q"] == counted["k"] == counted["v"] > 0
    assert sum(role == "o" for role in roles.values()) >= 2
    assert all(lr == (2e-2 if roles[name] in "qk" else 1e-3) for name, lr in rates(groups).items())


@pytest.mark.parametrize("family", FUSED)
def test_parts_of_a_fused_weight_have_separate_rates(family: str) -> None:
    """Queries and keys change as at the higher rate, values as at the base rate."""
    fused = tuple(name for name, role in hf.infer_parameter_roles(tiny(family)).items() if role == "qkv")

    def trained(rate: float, ratio: float | None = None) -> dict[str, torch.Tensor]:
        model = tiny(family)
        whole: Any = [p for name, p in model.named_parameters() if name in fused]
        optimizer = torch.optim.SGD(
            whole if ratio is None else hf.param_groups(model, rate, ratio=ratio), rate
        )
        model(input_ids=token_ids())[0].square().mean().backward()
        optimizer.step()
        return model.state_dict()

    split, slow, fast = trained(1e-2, ratio=5), trained(1e-2), trained(5e-2)
    layer = find_attention_layers(tiny(family))[0]
    axis = -1 if hasattr(layer.module.get_submodule(layer.q_name), "nf") else 0
    q, k, v = layer.layout.rows()
    for name in fused:
        for rows, expected in ((q, fast), (k, fast), (v, slow)):
            part = split[name].index_select(axis, rows)
            torch.testing.assert_close(part, expected[name].index_select(axis, rows), msg=name)


def test_split_multihead_attention() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x, keys = torch.randn(2, 5, 16), set(model.state_dict())
    before = model(x)
    groups = hf.param_groups(model, 1e-3, ratio=4)
    check_each_parameter_once(model, groups)
    assert torch.equal(model(x), before)
    assert set(model.state_dict()) == keys
    fast = [name for name, rate in rates(groups).items() if rate == pytest.approx(4e-3)]
    assert len(fast) == 2 * 2 * 2  # layers, parts, weight and bias


def test_refuse_fused_weights() -> None:
    with raises_code("fused-qkv"):
        hf.param_groups(tiny("gpt2"), 1e-3, ratio=2, fused_qkv="refuse")
    model = tiny("gpt2")
    groups = hf.param_groups(model, 1e-3, ratio=1)
    check_each_parameter_once(model, groups)
    assert "fused" in {group["name"] for group in groups}, "a ratio of 1 needs no splitting"
    codegen = codegen_model()
    with raises_code("unknown-qkv-layout"):
        hf.param_groups(codegen, 1e-3, ratio=2)


def codegen_model() -> Any:
    import transformers

    options = {"rotary_dim": 8, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.CodeGenForCausalLM(
        transformers.CodeGenConfig(vocab_size=96, n_embd=64, n_head=4, n_layer=1, **options)
    )


def test_options_are_independent() -> None:
    model = hf.attach(tiny("qwen3"), "euler")
    base = {row.name: row for row in describe_param_groups(model, 1e-3, weight_decay=0.1)}
    for option, group in (({"ratio": 3.0}, "qk"), ({"embed_ratio": 3.0}, "embed")):
        for row in describe_param_groups(model, 1e-3, weight_decay=0.1, **option):
            assert row.weight_decay == base[row.name].weight_decay
            assert row.lr == pytest.approx(base[row.name].lr * (3 if row.group == group else 1))
    assert all(row.weight_decay == (0.1 if len(row.shape) > 1 else 0) for row in base.values())
    assert all(
        row.weight_decay == 0.1 for row in describe_param_groups(model, 1e-3, weight_decay=0.1, decay="all")
    )
    wider = describe_param_groups(model, 1e-3, ratio=2, qk_roles=("q", "k", "qk_norm", "coupling"))
    fast = {row.role for row in wider if row.group == "qk"}
    assert fast == {"q", "k", "qk_norm", "coupling"}


def test_frozen_parameters_are_excluded() -> None:
    model = hf.attach(tiny("llama"), "affine", freeze_base=True)
    groups = hf.param_groups(model, 1e-3)
    assert all(".coupling." in name for group in groups for name in group["names"])
    with raises_code("no-qk-parameters"):
        hf.param_groups(model, 1e-3, ratio=2)


def test_lora_roles() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny("llama"), LoraConfig(target_modules=["q_proj", "v_proj"]))
    roles = hf.infer_parameter_roles(model)
    assert all(role == "q" for name, role in roles.items() if "q_proj.lora_" in name)
    fast = rates(hf.param_groups(model, 1e-3, ratio=2))
    assert {name for name, rate in fast.items() if rate == 2e-3} == {
        name for name in fast if "q_proj.lora_" in name
    }


class Foreign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seek, self.offer, self.rest = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)


def test_role_mapping_adds_to_inferred_roles() -> None:
    model = tiny("llama")
    model.extra = nn.Linear(4, 4)
    roles = hf.infer_parameter_roles(model, {"extra.*": "mlp"})
    assert roles["extra.weight"] == "mlp"
    assert roles["model.layers.0.self_attn.q_proj.weight"] == "q"


def test_role_mapping_of_unknown_module() -> None:
    model = Foreign()
    with raises_code("unknown-parameter-role"):
        hf.param_groups(model, 1e-3, ratio=2)
    roles = {"seek.*": "q", "offer.*": "k", "*": "mlp"}
    groups = hf.param_groups(model, 1e-3, ratio=2, roles=roles)
    check_each_parameter_once(model, groups)
    fast = {name for name, rate in rates(groups).items() if rate == 2e-3}
    assert fast == {"seek.weight", "seek.bias", "offer.weight", "offer.bias"}
    by_function = hf.param_groups(model, 1e-3, ratio=2, roles=lambda name: "q" if "seek" in name else "mlp")
    assert {name for name, rate in rates(by_function).items() if rate == 2e-3} == {"seek.weight", "seek.bias"}
    with raises_code("unmatched-pattern"):
        hf.param_groups(model, 1e-3, roles={**roles, "sek.*": "q"})
    with raises_code("unknown-role"):
        hf.param_groups(model, 1e-3, roles={"*": "query"})
    with raises_code("unknown-parameter-role"):
        hf.param_groups(model, 1e-3, roles={"seek.*": "q", "offer.*": "k"})


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"lr": 0.0}, "invalid-lr"),
        ({"ratio": 0.0}, "invalid-ratio"),
        ({"ratio": -1.0}, "invalid-ratio"),
        ({"ratio": float("nan")}, "invalid-ratio"),
        ({"embed_ratio": 0.0}, "invalid-embed-ratio"),
        ({"weight_decay": -0.1}, "invalid-weight-decay"),
        ({"decay": "some"}, "unknown-decay"),
        ({"qk_roles": ("query",)}, "unknown-role"),
        ({"fused_qkv": "maybe"}, "unknown-fused-qkv"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], code: str) -> None:
    with raises_code(code):
        hf.param_groups(tiny("llama"), **{"lr": 1e-3, **options})
