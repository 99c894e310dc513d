"""Coupled layers in generation: KV caches, changed weights, hooks, preparation for inference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

from families import FAMILIES, disturb, output, tiny, token_ids
from qkflow import hf

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}
COUPLINGS = ("affine", "drift", "euler", "euler:n=2", "leapfrog", "uncoupled")


def window(family: str) -> dict[str, int]:
    """Config of a sliding-window cache, where the family has one."""
    return {"sliding_window": 4} if family in ("mistral", "gemma3") else {}


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gpt_neox", "mistral", "gemma3"])
def test_caches_beams_and_padding_match_uncached(family: str) -> None:
    model = hf.attach(tiny(family, **window(family)), "affine")
    disturb(model, 0.5)
    ids = token_ids(2, 5)
    plain = model.generate(ids, use_cache=False, **GREEDY)
    assert torch.equal(model.generate(ids, **GREEDY), plain)
    assert torch.equal(model.generate(ids, cache_implementation="static", **GREEDY), plain)
    beams = model.generate(ids, num_beams=3, use_cache=False, **GREEDY)
    assert torch.equal(model.generate(ids, num_beams=3, **GREEDY), beams)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], dim=1)
    left = model.generate(padded, attention_mask=(padded != 0).long(), **GREEDY)
    assert torch.equal(left[:, 3:], plain)


@pytest.mark.filterwarnings("ignore")  # deprecated names
@pytest.mark.parametrize("cache", ALL_CACHE_IMPLEMENTATIONS)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_cache_implementations(family: str, cache: str) -> None:
    """Offloaded caches need a GPU and quantized ones a package; without, both models raise the same error."""
    ids, outcomes = token_ids(2, 5), []
    for coupled in (False, True):
        model = tiny(family, **window(family))
        if coupled:
            hf.attach(model, "euler", seed=0)
        plain = model.generate(ids, use_cache=False, **GREEDY)
        try:
            tokens = model.generate(ids, cache_implementation=cache, **GREEDY)
        except (AssertionError, ImportError, RuntimeError, ValueError) as error:
            outcomes.append(type(error))
        else:
            assert tokens.shape == plain.shape
            assert "quantized" in cache or torch.equal(tokens, plain), "only quantization may change a token"
            outcomes.append(type(None))
    assert outcomes[0] is outcomes[1]


def fresh(model: Any, coupling: str) -> Any:
    """Return a new model with the same parameters."""
    other = hf.attach(tiny("llama"), coupling, seed=0)
    other.load_state_dict(model.state_dict())
    return other


@torch.no_grad()
def through_data(model: Any) -> None:
    """Change weights without a version count, as PEFT does when it merges adapters."""
    for name, parameter in model.named_parameters():
        if ".coupling." in name or "q_proj" in name:
            parameter.data += 0.1


@torch.no_grad()
def values_through_data(model: Any) -> None:
    for _, layer in hf.named_coupled_layers(model):
        layer.v_proj.weight.data *= 1.1


@torch.no_grad()
def heads_swapped_through_data(model: Any) -> None:
    """Change weights and keep their sums."""
    disturb(model)
    for _, layer in hf.named_coupled_layers(model):
        output(model, token_ids())
        keys = layer.k_proj.weight.data.unflatten(0, (2, -1))
        layer.k_proj.weight.data.copy_(keys.flip(0).flatten(0, 1).clone())


def in_place(model: Any) -> None:
    disturb(model)


def fused_step(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model(input_ids=token_ids(), labels=token_ids()).loss.backward()
    model.generate(token_ids(), **GREEDY)  # between backward and step
    optimizer.step()


def replaced(model: Any) -> None:
    for _, layer in hf.named_coupled_layers(model):
        layer.k_proj.weight = torch.nn.Parameter(layer.k_proj.weight + 0.1)


@pytest.mark.parametrize(
    "change",
    [through_data, values_through_data, heads_swapped_through_data, in_place, fused_step, replaced],
)
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_changed_weights_are_used(coupling: str, change: Callable[[Any], None]) -> None:
    model = hf.attach(tiny("llama"), coupling, seed=0)
    for _ in range(2):  # first from the init, where affine is the identity
        before = output(model, token_ids())
        change(model)
        after = output(model, token_ids())
        assert not torch.equal(after, before)
        assert torch.equal(after, output(fresh(model, coupling), token_ids()))


@pytest.mark.parametrize("coupling", ["affine", "euler"])
def test_changed_weights_are_used_by_generate(coupling: str) -> None:
    model, first = hf.attach(tiny("llama"), coupling, seed=0), token_ids()[:, :1]
    options = {**GREEDY, "output_logits": True, "return_dict_in_generate": True}
    model.generate(first, **options)
    through_data(model)
    outcomes = model.generate(first, **options)
    expected = fresh(model, coupling).generate(first, **options)
    assert all(torch.equal(a, b) for a, b in zip(outcomes.logits, expected.logits, strict=True))


@pytest.mark.parametrize("projection", ["q_proj", "k_proj", "v_proj"])
def test_projection_hooks_run(projection: str) -> None:
    model = hf.attach(tiny("llama"), "euler", seed=0)
    before = output(model, token_ids())
    for _, layer in hf.named_coupled_layers(model):
        getattr(layer, projection).register_forward_hook(lambda module, given, out: out * 1.5)
    assert not torch.allclose(output(model, token_ids()), before)


def test_identity_init_keeps_generated_logits() -> None:
    model = tiny("llama")
    expected = model.generate(token_ids(), output_logits=True, return_dict_in_generate=True, **GREEDY)
    hf.attach(model, "affine")
    got = model.generate(token_ids(), output_logits=True, return_dict_in_generate=True, **GREEDY)
    assert all(torch.equal(a, b) for a, b in zip(got.logits, expected.logits, strict=True))


def test_copies_are_independent() -> None:
    model = hf.attach(tiny("llama"), "drift")
    expected = output(model, token_ids())
    other = copy.deepcopy(model)
    disturb(other)
    assert not torch.equal(output(other, token_ids()), expected)
    assert torch.equal(output(model, token_ids()), expected)


@pytest.mark.parametrize("coupling", ["affine", "euler"])
def test_attach_in_inference_mode(coupling: str) -> None:
    expected = hf.attach(tiny("llama"), coupling, seed=0).generate(token_ids(), **GREEDY)
    with torch.inference_mode():
        model = hf.attach(tiny("llama"), coupling, seed=0)
        assert torch.equal(model.generate(token_ids(), **GREEDY), expected)


def prepared_layers(model: Any) -> list[Any]:
    coupled = [layer for _, layer in hf.named_coupled_layers(model)]
    return [layer for layer in coupled if layer.prepared_qk is not None or layer.skips_identity]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "opt", "bert", "t5_encoder"])
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_prepared_model_matches_regular(coupling: str, family: str) -> None:
    model = hf.attach(tiny(family), coupling, seed=0)
    disturb(model)
    expected = output(model, token_ids())
    hf.prepare_for_inference(model)
    assert len(prepared_layers(model)) == 2
    torch.testing.assert_close(output(model, token_ids()), expected, rtol=1e-4, atol=1e-5)
    hf.detach(model)
    assert torch.equal(output(model, token_ids()), output(tiny(family), token_ids()))


@pytest.mark.parametrize("family", FAMILIES)
def test_prepared_identity_is_bit_identical(family: str) -> None:
    model = tiny(family)
    expected = output(model, token_ids())
    hf.prepare_for_inference(hf.attach(model, "affine", seed=0))
    assert len(prepared_layers(model)) == 2
    assert torch.equal(output(model, token_ids()), expected)


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_prepared_model_generates_the_same_tokens(coupling: str) -> None:
    model = hf.attach(tiny("llama"), coupling, seed=0)
    disturb(model, 0.5)
    expected = model.generate(token_ids(2, 5), **GREEDY)
    hf.prepare_for_inference(model)
    for cache in ("dynamic", "static"):
        assert torch.equal(model.generate(token_ids(2, 5), cache_implementation=cache, **GREEDY), expected)


@pytest.mark.parametrize("coupling", ["affine", "euler"])
@pytest.mark.parametrize(
    "undo",
    [
        lambda model: model.train().eval(),
        lambda model: model.to(torch.float64).to(torch.float32),
        lambda model: model.load_state_dict(model.state_dict()),
        lambda model: setattr(model, "copied", copy.deepcopy(model)),
    ],
    ids=["train", "to", "load_state_dict", "deepcopy"],
)
def test_preparation_is_undone(undo: Callable[[Any], object], coupling: str) -> None:
    model = hf.prepare_for_inference(hf.attach(tiny("llama"), coupling, seed=0))
    assert prepared_layers(model)
    undo(model)
    model = getattr(model, "copied", model)
    assert not prepared_layers(model)
    disturb(model)
    assert torch.equal(output(model, token_ids()), output(fresh(model, coupling), token_ids()))


@pytest.mark.parametrize("coupling", ["affine", "drift", "euler"])
def test_prepared_model_has_gradients(coupling: str) -> None:
    gradients = []
    for prepare in (False, True):
        model = hf.attach(tiny("llama"), coupling, seed=0)
        if prepare:
            hf.prepare_for_inference(model)
        model(input_ids=token_ids(), labels=token_ids()).loss.backward()
        gradients.append([p.grad for _, layer in hf.named_coupled_layers(model) for p in layer.parameters()])
    assert all(gradient is not None for gradient in gradients[1])
    torch.testing.assert_close(*gradients)


def add_hook(model: Any) -> None:
    for _, layer in hf.named_coupled_layers(model):
        layer.k_proj.register_forward_hook(lambda module, args, out: out * 1.5)


def add_lora(model: Any) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    inject_adapter_in_model(LoraConfig(target_modules=["q_proj"], init_lora_weights=False), model)


def lower_coupling_precision(model: Any) -> None:
    for _, layer in hf.named_coupled_layers(model):
        layer.coupling.bfloat16()


def hook_coupling(model: Any) -> None:
    for _, layer in hf.named_coupled_layers(model):
        layer.coupling.register_forward_hook(lambda module, args, out: (2 * out[0], out[1]))


@pytest.mark.parametrize(
    ("coupling", "change"),
    [
        ("euler", add_hook),
        ("euler", add_lora),
        ("euler", lower_coupling_precision),
        ("euler", hook_coupling),
        ("affine", hook_coupling),  # the identity
        ("drift:learn_step=false", lower_coupling_precision),  # a buffer
    ],
)
def test_changed_layers_are_not_prepared(coupling: str, change: Callable[[Any], None]) -> None:
    model = hf.attach(tiny("llama"), coupling, seed=0)
    change(model)
    model.eval()
    expected = output(model, token_ids())
    hf.prepare_for_inference(model)
    assert not prepared_layers(model)
    assert torch.equal(output(model, token_ids()), expected)


def test_hooked_value_projection_runs_in_prepared_layer() -> None:
    model = hf.attach(tiny("llama"), "euler", seed=0)
    for _, layer in hf.named_coupled_layers(model):
        layer.v_proj.register_forward_hook(lambda module, args, out: out * 1.5)
    expected = output(model, token_ids())
    hf.prepare_for_inference(model)
    assert len(prepared_layers(model)) == 2
    torch.testing.assert_close(output(model, token_ids()), expected)


def test_prepare_qkflow_model() -> None:
    config = hf.QKFlowConfig(vocab_size=96, n_layers=2, dim=32, n_heads=4, attention={"coupling": "euler"})
    model = hf.QKFlowForCausalLM(config).eval()
    expected = output(model, token_ids())
    hf.prepare_for_inference(model)
    assert all(block.attention.is_prepared for block in model.model.decoder.blocks)
    torch.testing.assert_close(output(model, token_ids()), expected)
