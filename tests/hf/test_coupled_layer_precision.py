"""Couplings and models in different dtypes, and autocast."""

from __future__ import annotations

import pytest
import torch

from families import disturb, output, tiny, token_ids
from qkflow import hf

COUPLINGS = ("affine", "drift", "euler", "leapfrog", "uncoupled")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_float32_coupling_in_bfloat16_model(coupling: str, family: str) -> None:
    model = hf.attach(tiny(family).bfloat16(), coupling, seed=0)
    disturb(model)
    for _, layer in hf.named_coupled_layers(model):
        layer.coupling.float()
    many = token_ids(2, 300) if family == "llama" else token_ids()  # more tokens than rows of a weight
    model.train()(input_ids=many, labels=many).loss.backward()
    assert all(
        p.grad is not None for _, layer in hf.named_coupled_layers(model) for p in layer.coupling.parameters()
    )
    options = {"do_sample": False, "max_new_tokens": 3, "pad_token_id": 0}
    tokens = model.eval().generate(token_ids(), **options)
    assert torch.equal(tokens, model.generate(token_ids(), use_cache=False, **options))


@pytest.mark.parametrize("inner", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("outer", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_identity_is_exact_under_autocast(family: str, outer: torch.dtype, inner: torch.dtype) -> None:
    model, logits = tiny(family).to(outer), []
    for _ in range(2):
        with torch.autocast("cpu", inner):
            logits.append(model(input_ids=token_ids()).logits.detach())
            with torch.no_grad():
                logits.append(model(input_ids=token_ids()).logits)
        if not hf.named_coupled_layers(model):
            hf.attach(model, "affine")
    assert torch.equal(logits[0], logits[2])
    assert torch.equal(logits[1], logits[3])


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_meta_forward(coupling: str) -> None:
    model = hf.attach(tiny("llama"), coupling).to("meta")
    assert model(input_ids=token_ids().to("meta")).logits.shape == (*token_ids().shape, 96)
    with torch.no_grad():
        assert output(model, token_ids().to("meta")).shape == (*token_ids().shape, 96)


def test_coupling_dtype_follows_model() -> None:
    model = tiny("llama").to(torch.bfloat16)
    before = output(model, token_ids())
    hf.attach(model, "affine")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(output(model, token_ids()), before)


def test_autocast_training() -> None:
    model = hf.attach(tiny("llama"), "euler")
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=token_ids(), labels=token_ids()).loss
    loss.backward()
    assert torch.isfinite(loss)
