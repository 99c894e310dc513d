"""Decoding a few tokens at a time with a slow path: equal to the full pass, at one slow step for P tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkflow.attention import couplings, merge, scorings
from qkflow.errors import InputError
from qkflow.models import Decoder, ModelConfig

BASE = {"vocab_size": 24, "n_layers": 2, "dim": 16, "n_heads": 2, "init": "fan_in"}


def decoder(P=4, dtype=torch.float64, **attention):
    config = {
        **BASE,
        "attention": attention,
        "slow": {"ratio": P, "n_layers": 2, "gate_init": 0.8, "inject": "each"},
    }
    return Decoder(ModelConfig.from_dict(config), seed=0, dtype=dtype).eval()


MODELS = {P: decoder(P) for P in (2, 3, 4, 8)}


def tokens(*shape, seed=0):
    return torch.randint(BASE["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def decode(model, ids, sizes, caches=None):
    caches = caches or model.new_caches(len(ids), sum(sizes))
    return torch.cat([model(chunk, caches=caches) for chunk in ids.split(sizes, 1)], 1)


@given(
    st.sampled_from(sorted(MODELS)), st.lists(st.integers(1, 11), min_size=1, max_size=10), st.integers(0, 99)
)
@settings(max_examples=60, deadline=None)
def test_chunks_of_any_size_equal_the_full_pass(P, sizes, seed):
    ids = tokens(2, sum(sizes), seed=seed)
    torch.testing.assert_close(decode(MODELS[P], ids, sizes), MODELS[P](ids))


@pytest.mark.parametrize(
    "attention",
    [{"coupling": name} for name in couplings.names()] + [{"scoring": name} for name in scorings.names()],
    ids=lambda attention: next(iter(attention.values())),
)
def test_every_coupling_and_scoring_decodes(attention):
    model, ids = decoder(3, **attention), tokens(2, 14)
    full = model(ids)
    torch.testing.assert_close(decode(model, ids, [5] + [1] * 9), full)
    if attention.get("coupling") == "drift":
        torch.testing.assert_close(decode(merge(model), ids, [5] + [1] * 9), full)


def test_the_slow_path_runs_once_for_every_block():
    model, ids = MODELS[4], tokens(1, 31)
    calls = []
    hook = model.slow.blocks[0].register_forward_hook(
        lambda block, inputs, out: calls.append(inputs[0].shape[1])
    )
    decode(model, ids, [1] * 31)
    assert calls == [1] * 7
    calls.clear()
    decode(model, ids, [2, 9, 1, 19])
    assert calls == [2, 1, 4]
    hook.remove()


@given(st.integers(0, 21), st.sampled_from(sorted(MODELS)))
@settings(max_examples=40, deadline=None)
def test_a_rewound_cache_goes_on_as_if_nothing_had_followed(length, P):
    model, ids, other = MODELS[P], tokens(2, 21), tokens(2, 21, seed=1)
    caches = model.new_caches(2, 21)
    decode(model, torch.cat([ids[:, :length], other[:, length:]], 1), [21], caches)
    for cache in caches:
        cache.crop(length)
    if length < 21:
        rest = decode(model, ids[:, length:], [1] * (21 - length), caches)
        torch.testing.assert_close(rest, model(ids)[:, length:])


def test_rows_can_be_reordered_in_the_middle_of_a_block():
    model, ids, rows = MODELS[4], tokens(3, 22), torch.tensor([2, 0, 0])
    caches = model.new_caches(3, 22)
    decode(model, ids[:, :10], [10], caches)
    for cache in caches:
        cache.reorder(rows)
    rest = decode(model, ids[:, 10:], [1] * 12, caches)
    mixed = torch.cat([ids[rows, :10], ids[:, 10:]], 1)
    torch.testing.assert_close(rest, model(mixed)[:, 10:])


def test_low_precision_and_inference_mode():
    model, ids = decoder(4, torch.bfloat16), tokens(2, 15)
    with torch.inference_mode():
        torch.testing.assert_close(decode(model, ids, [1] * 15), model(ids), rtol=0.05, atol=0.05)


def test_a_cache_shorter_than_a_block_works_until_it_is_full():
    model, ids = MODELS[8], tokens(1, 6)
    caches = model.new_caches(1, 5)
    torch.testing.assert_close(decode(model, ids[:, :5], [2, 3], caches), model(ids[:, :5]))
    with pytest.raises(InputError, match="room for 5 tokens, 5 are in it and 1 more"):
        model(ids[:, 5:], caches=caches)


def test_bad_use_of_the_cache_is_refused():
    model, ids = MODELS[4], tokens(2, 6)
    caches = model.new_caches(2, 6)
    with pytest.raises(InputError, match="a batch of 2, not 1"):
        model(ids[:1], caches=caches)
    real = torch.ones_like(ids)
    torch.testing.assert_close(model(ids, attention_mask=real, caches=model.new_caches(2, 6)), model(ids))
    real[0, 0] = 0
    for packing in ({"padding": real}, {"documents": real}):
        with pytest.raises(InputError, match="rows of equal length"):
            model(ids, caches=model.new_caches(2, 6), **packing)
    with pytest.raises(InputError, match="cannot rewind a cache of 0 tokens to 3"):
        model.new_caches(2, 6)[-1].crop(3)
