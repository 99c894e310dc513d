from __future__ import annotations

import copy
from pathlib import Path

import torch

from families import output, tiny, token_ids
from input_errors import raises_code
from qkflow import hf


def test_split_state_dict_round_trip() -> None:
    model, plain = tiny("gpt2"), tiny("gpt2")
    split = hf.split_fused_qkv(model)
    assert "transformer.h.0.attn.c_attn.weight" in split
    assert hf.split_fused_qkv(model) == [], "check_each_parameter_once is enough"
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


def test_split_and_fuse_repeatedly() -> None:
    model = tiny("gpt2")
    keys = set(model.state_dict())
    for _ in range(2):
        hf.split_fused_qkv(model)
        assert set(model.state_dict()) == keys
        model.load_state_dict(tiny("gpt2").state_dict())
        model = copy.deepcopy(model)
        hf.fuse_qkv(model)
    assert {name for name, _ in model.named_parameters()} == {n for n, _ in tiny("gpt2").named_parameters()}


def test_save_pretrained_of_split_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny("gpt2")
    hf.split_fused_qkv(model)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(output(again.eval(), token_ids()), output(model, token_ids()))


def test_merge_refuses_split_model() -> None:
    model = tiny("gpt2")
    hf.split_fused_qkv(model)
    hf.attach(model, "drift")
    with raises_code("parametrized-weight"):
        hf.merge(model)
    hf.fuse_qkv(model)
    hf.merge(model)


def test_split_refuses_quantized_weight() -> None:
    model = tiny("gpt2")
    layer = model.transformer.h[0].attn.c_attn
    weight = layer.weight.detach()
    del layer.weight
    layer.register_buffer("weight", weight)  # as a quantised layer keeps it
    with raises_code("adapted-projection"):
        hf.split_fused_qkv(model)
