from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from families import FAMILIES, FUSED, output, tiny, token_ids
from qkflow import hf
from qkflow.errors import InputError
from qkflow.hf.attention_layers import find_attention_layers
from qkflow.hf.parameter_roles import describe_param_groups
from qkflow.models import PRESETS, Decoder, preset


def once(model: nn.Module, groups: list[dict[str, Any]]) -> None:
    """Every parameter is in exactly one group, under its own name."""
    held = [p for group in groups for p in group["params"]]
    names = [name for group in groups for name in group["names"]]
    assert sorted(map(id, held)) == sorted(map(id, model.parameters()))
    assert all(model.get_parameter(name) is p for name, p in zip(names, held, strict=True))


def rates(groups: list[dict[str, Any]]) -> dict[str, float]:
    return {name: group["lr"] for group in groups for name in group["names"]}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset(name: str) -> None:
    attention = {"coupling": "euler", "qk_norm": True, "bias": True}
    model = Decoder(preset(name, attention=attention, n_layers=2), device="meta")
    groups = hf.param_groups(model, 1e-3, ratio=20, weight_decay=0.1)
    once(model, groups)
    fast = {name for name, rate in rates(groups).items() if rate == pytest.approx(2e-2)}
    assert fast == {
        f"blocks.{layer}.attention.qk.{part}.{tensor}"
        for layer in (0, 1)
        for part in "qk"
        for tensor in ("weight", "bias")
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    model = tiny(family)
    before, keys = output(model, token_ids()), set(model.state_dict())
    groups = hf.param_groups(model, 1e-3, ratio=20, weight_decay=0.1)
    once(model, groups)
    assert {group["name"] for group in groups} == {"qk", "embed", "rest"}
    assert torch.equal(output(model, token_ids()), before)
    assert set(model.state_dict()) == keys
    roles = hf.infer_parameter_roles(model)
    counted = {part: sum(role == part for role in roles.values()) for part in "qkv"}
    assert counted["q"] == counted["k"] == counted["v"] > 0
    assert sum(role == "o" for role in roles.values()) >= 2
    assert all(lr == (2e-2 if roles[name] in "qk" else 1e-3) for name, lr in rates(groups).items())


@pytest.mark.parametrize("family", FUSED)
def test_the_parts_of_a_fused_weight_learn_each_at_its_own_rate(family: str) -> None:
    """Queries and keys move as the whole weight does at the fast rate, values as it does at the slow one."""
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
    site = find_attention_layers(tiny(family))[0]
    axis = -1 if hasattr(site.module.get_submodule(site.q_name), "nf") else 0
    q, k, v = site.layout.rows()
    for name in fused:
        for rows, expected in ((q, fast), (k, fast), (v, slow)):
            part = split[name].index_select(axis, rows)
            torch.testing.assert_close(part, expected[name].index_select(axis, rows), msg=name)


def test_split_weights_load_and_save_as_before() -> None:
    model, plain = tiny("gpt2"), tiny("gpt2")
    split = hf.split_fused_qkv(model)
    assert "transformer.h.0.attn.c_attn.weight" in split
    assert hf.split_fused_qkv(model) == [], "once is enough"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(output(plain, token_ids()), output(model, token_ids()))
    again = tiny("gpt2")
    hf.split_fused_qkv(again)
    again.load_state_dict(plain.state_dict())
    assert torch.equal(output(again, token_ids()), output(model, token_ids()))
    copied = copy.deepcopy(model)
    assert torch.equal(output(copied, token_ids()), output(model, token_ids()))
    hf.fuse_qkv(model)
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in plain.named_parameters()}
    assert torch.equal(output(model, token_ids()), output(plain, token_ids()))


def test_weights_are_split_again_after_they_were_joined() -> None:
    model = tiny("gpt2")
    keys = set(model.state_dict())
    for _ in range(2):
        hf.split_fused_qkv(model)
        assert set(model.state_dict()) == keys
        model.load_state_dict(tiny("gpt2").state_dict())
        model = copy.deepcopy(model)
        hf.fuse_qkv(model)
    assert {name for name, _ in model.named_parameters()} == {n for n, _ in tiny("gpt2").named_parameters()}


def test_a_split_model_is_saved_as_any_other(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny("gpt2")
    hf.split_fused_qkv(model)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(output(again.eval(), token_ids()), output(model, token_ids()))


def test_a_split_model_can_be_coupled_but_not_merged() -> None:
    model = tiny("gpt2")
    hf.split_fused_qkv(model)
    hf.attach(model, "drift")
    with pytest.raises(InputError, match=r"hf.fuse_qkv first"):
        hf.merge(model)
    hf.fuse_qkv(model)
    hf.merge(model)


def test_torch_attention_is_split() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x, keys = torch.randn(2, 5, 16), set(model.state_dict())
    before = model(x)
    groups = hf.param_groups(model, 1e-3, ratio=4)
    once(model, groups)
    assert torch.equal(model(x), before)
    assert set(model.state_dict()) == keys
    fast = [name for name, rate in rates(groups).items() if rate == pytest.approx(4e-3)]
    assert len(fast) == 2 * 2 * 2  # layers, parts, weight and bias


def test_fused_weights_can_be_refused_instead() -> None:
    with pytest.raises(InputError, match=r"c_attn.weight.*hold queries, keys and values in one parameter"):
        hf.param_groups(tiny("gpt2"), 1e-3, ratio=2, fused_qkv="refuse")
    model = tiny("gpt2")
    groups = hf.param_groups(model, 1e-3, ratio=1)
    once(model, groups)
    assert "fused" in {group["name"] for group in groups}, "a ratio of 1 needs no splitting"
    codegen = codegen_model()
    with pytest.raises(InputError, match=r"not known here"):
        hf.param_groups(codegen, 1e-3, ratio=2)


def test_fused_weights_that_are_no_parameter_cannot_be_split() -> None:
    model = tiny("gpt2")
    layer = model.transformer.h[0].attn.c_attn
    weight = layer.weight.detach()
    del layer.weight
    layer.register_buffer("weight", weight)  # as a quantised layer keeps it
    with pytest.raises(InputError, match=r"no weight of its own to split"):
        hf.split_fused_qkv(model)


def codegen_model() -> Any:
    import transformers

    options = {"rotary_dim": 8, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.CodeGenForCausalLM(
        transformers.CodeGenConfig(vocab_size=96, n_embd=64, n_head=4, n_layer=1, **options)
    )


def test_knobs_are_separate() -> None:
    model = hf.attach(tiny("qwen3"), "euler")
    base = {row.name: row for row in describe_param_groups(model, 1e-3, weight_decay=0.1)}
    for knob, group in (({"ratio": 3.0}, "qk"), ({"embed_ratio": 3.0}, "embed")):
        for row in describe_param_groups(model, 1e-3, weight_decay=0.1, **knob):
            assert row.weight_decay == base[row.name].weight_decay
            assert row.lr == pytest.approx(base[row.name].lr * (3 if row.group == group else 1))
    assert all(row.weight_decay == (0.1 if len(row.shape) > 1 else 0) for row in base.values())
    assert all(
        row.weight_decay == 0.1 for row in describe_param_groups(model, 1e-3, weight_decay=0.1, decay="all")
    )
    wider = describe_param_groups(model, 1e-3, ratio=2, qk_roles=("q", "k", "qk_norm", "coupling"))
    fast = {row.role for row in wider if row.group == "qk"}
    assert fast == {"q", "k", "qk_norm", "coupling"}


def test_frozen_parameters_are_left_out() -> None:
    model = hf.attach(tiny("llama"), "affine", freeze_base=True)
    groups = hf.param_groups(model, 1e-3)
    assert all(".coupling." in name for group in groups for name in group["names"])
    with pytest.raises(InputError, match=r"no trainable parameter has a role"):
        hf.param_groups(model, 1e-3, ratio=2)


def test_lora_weights_have_the_role_of_what_they_adapt() -> None:
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


def test_a_mapping_need_only_tell_what_is_not_known() -> None:
    model = tiny("llama")
    model.extra = nn.Linear(4, 4)
    roles = hf.infer_parameter_roles(model, {"extra.*": "mlp"})
    assert roles["extra.weight"] == "mlp"
    assert roles["model.layers.0.self_attn.q_proj.weight"] == "q"


def test_any_module_by_a_mapping() -> None:
    model = Foreign()
    with pytest.raises(
        InputError, match=r"role of 6 parameters of Foreign is not known: seek.weight, seek.bias"
    ):
        hf.param_groups(model, 1e-3, ratio=2)
    roles = {"seek.*": "q", "offer.*": "k", "*": "mlp"}
    groups = hf.param_groups(model, 1e-3, ratio=2, roles=roles)
    once(model, groups)
    fast = {name for name, rate in rates(groups).items() if rate == 2e-3}
    assert fast == {"seek.weight", "seek.bias", "offer.weight", "offer.bias"}
    by_function = hf.param_groups(model, 1e-3, ratio=2, roles=lambda name: "q" if "seek" in name else "mlp")
    assert {name for name, rate in rates(by_function).items() if rate == 2e-3} == {"seek.weight", "seek.bias"}
    with pytest.raises(InputError, match=r"pattern 'sek.*' fits no parameter"):
        hf.param_groups(model, 1e-3, roles={**roles, "sek.*": "q"})
    with pytest.raises(InputError, match=r"unknown role 'query'"):
        hf.param_groups(model, 1e-3, roles={"*": "query"})
    with pytest.raises(InputError, match=r"not known: rest.weight, rest.bias"):
        hf.param_groups(model, 1e-3, roles={"seek.*": "q", "offer.*": "k"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "lr must be a positive number"),
        ({"ratio": 0.0}, "ratio must be a positive number, not 0.0"),
        ({"ratio": -1.0}, "ratio must be a positive number"),
        ({"ratio": float("nan")}, "ratio must be a positive number"),
        ({"embed_ratio": 0.0}, "embed_ratio must be"),
        ({"weight_decay": -0.1}, "weight_decay must be zero or more"),
        ({"decay": "some"}, "'matrices' or 'all'"),
        ({"qk": ("query",)}, "unknown role 'query'"),
        ({"fused": "maybe"}, "'split' or 'refuse'"),
    ],
)
def test_bad_input_is_said_plainly(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        hf.param_groups(tiny("llama"), **{"lr": 1e-3, **options})
