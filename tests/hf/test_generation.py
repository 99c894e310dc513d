"""Generation with couplings attached: every cache; what is prepared for it never outlives a change."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

from families import disturb, output, tiny, token_ids
from qkflow import hf

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}
COUPLINGS = ("affine", "drift", "euler", "euler:n=2", "leapfrog", "uncoupled")


def window(family: str) -> dict[str, int]:
    """Caches that forget, where the family has them."""
    return {"sliding_window": 4} if family in ("mistral", "gemma3") else {}


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gpt_neox", "mistral", "gemma3"])
def test_caches_beams_and_padding_give_the_same_tokens(family: str) -> None:
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


@pytest.mark.filterwarnings("ignore")  # some names are on their way out
@pytest.mark.parametrize("cache", ALL_CACHE_IMPLEMENTATIONS)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_cache_works_coupled_wherever_it_works_plain(family: str, cache: str) -> None:
    """Offloaded caches need a GPU and quantised ones a package; without it both refuse alike."""
    ids, found = token_ids(2, 5), []
    for coupled in (False, True):
        model = tiny(family, **window(family))
        if coupled:
            hf.attach(model, "euler", seed=0)
        plain = model.generate(ids, use_cache=False, **GREEDY)
        try:
            tokens = model.generate(ids, cache_implementation=cache, **GREEDY)
        except (AssertionError, ImportError, RuntimeError, ValueError) as error:
            found.append(type(error))
        else:
            assert tokens.shape == plain.shape
            assert "quantized" in cache or torch.equal(tokens, plain), "only quantising may change a token"
            found.append(type(None))
    assert found[0] is found[1]


def fresh(model: Any, coupling: str) -> Any:
    """A model with the same parameters that has never run."""
    other = hf.attach(tiny("llama"), coupling, seed=0)
    other.load_state_dict(model.state_dict())
    return other


@torch.no_grad()
def through_data(model: Any) -> None:
    """As PEFT merges adapters, and averages of weights are swapped in: no version is counted."""
    for name, parameter in model.named_parameters():
        if ".coupling." in name or "q_proj" in name:
            parameter.data += 0.1


@torch.no_grad()
def values_through_data(model: Any) -> None:
    for _, layer in hf.named_coupled_layers(model):
        layer.v_proj.weight.data *= 1.1


@torch.no_grad()
def heads_swapped_through_data(model: Any) -> None:
    """Every sum of weights stays what it was."""
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
    model.generate(token_ids(), **GREEDY)  # in the midst of a step, from the old weights
    optimizer.step()


def replaced(model: Any) -> None:
    for _, layer in hf.named_coupled_layers(model):
        layer.k_proj.weight = torch.nn.Parameter(layer.k_proj.weight + 0.1)


@pytest.mark.parametrize(
    "change",
    [through_data, values_through_data, heads_swapped_through_data, in_place, fused_step, replaced],
)
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_whatever_changes_the_weights_is_noticed(coupling: str, change: Callable[[Any], None]) -> None:
    model = hf.attach(tiny("llama"), coupling, seed=0)
    for _ in range(2):  # from the start, where an affine does nothing, and from there
        before = output(model, token_ids())
        change(model)
        after = output(model, token_ids())
        assert not torch.equal(after, before)
        assert torch.equal(after, output(fresh(model, coupling), token_ids()))


@pytest.mark.parametrize("coupling", ["affine", "euler"])
def test_changed_weights_are_noticed_when_a_text_begins_with_a_single_token(coupling: str) -> None:
    model, first = hf.attach(tiny("llama"), coupling, seed=0), token_ids()[:, :1]
    asked = {**GREEDY, "output_logits": True, "return_dict_in_generate": True}
    model.generate(first, **asked)
    through_data(model)
    found = model.generate(first, **asked)
    wanted = fresh(model, coupling).generate(first, **asked)
    assert all(torch.equal(a, b) for a, b in zip(found.logits, wanted.logits, strict=True))


@pytest.mark.parametrize("projection", ["q_proj", "k_proj", "v_proj"])
def test_a_hook_on_a_projection_is_heard_in_generation(projection: str) -> None:
    model = hf.attach(tiny("llama"), "euler", seed=0)
    before = output(model, token_ids())  # prepares everything
    for _, layer in hf.named_coupled_layers(model):
        getattr(layer, projection).register_forward_hook(lambda module, given, out: out * 1.5)
    assert not torch.allclose(output(model, token_ids()), before)


def test_an_affine_at_its_start_generates_what_the_model_did() -> None:
    model = tiny("llama")
    wanted = model.generate(token_ids(), output_logits=True, return_dict_in_generate=True, **GREEDY)
    hf.attach(model, "affine")
    got = model.generate(token_ids(), output_logits=True, return_dict_in_generate=True, **GREEDY)
    assert all(torch.equal(a, b) for a, b in zip(got.logits, wanted.logits, strict=True))


def test_copies_and_pickles_go_without_what_was_prepared() -> None:
    model = hf.attach(tiny("llama"), "drift")
    size = len(pickle.dumps(model))
    expected = output(model, token_ids())
    assert len(pickle.dumps(model)) == size
    other = copy.deepcopy(model)
    disturb(other)
    assert not torch.equal(output(other, token_ids()), expected)
    assert torch.equal(output(model, token_ids()), expected)


@pytest.mark.parametrize("coupling", ["affine", "euler"])
def test_models_made_in_inference_mode_generate(coupling: str) -> None:
    expected = hf.attach(tiny("llama"), coupling, seed=0).generate(token_ids(), **GREEDY)
    with torch.inference_mode():
        model = hf.attach(tiny("llama"), coupling, seed=0)
        assert torch.equal(model.generate(token_ids(), **GREEDY), expected)
