"""Incremental decoding with a slow path equals the full forward and runs one slow step per P tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from input_errors import raises_code
from qkflow.attention import couplings, merge, scorings
from qkflow.attention.kv_cache import KVCache
from qkflow.models import Decoder, ModelConfig
from qkflow.models.slow_path.cache import SlowPathCache

BASE: dict[str, Any] = {"vocab_size": 24, "n_layers": 2, "dim": 16, "n_heads": 2, "init": "fan_in"}


def decoder(P: int = 4, dtype: torch.dtype = torch.float64, pool_after: int = 0, **attention: Any) -> Decoder:
    config = {
        **BASE,
        "attention": attention,
        "slow": {"ratio": P, "n_layers": 2, "gate_init": 0.8, "inject": "each", "pool_after": pool_after},
    }
    return Decoder(ModelConfig.from_dict(config), seed=0, dtype=dtype).eval()


MODELS = {P: decoder(P) for P in (2, 3, 4, 8)}
POOLED_AFTER_LAYER = decoder(3, pool_after=1)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(BASE["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def decode(
    model: Decoder, ids: Tensor, sizes: list[int], caches: list[KVCache | SlowPathCache] | None = None
) -> Tensor:
    caches = caches or model.new_caches(len(ids), sum(sizes))
    return torch.cat([model(chunk, caches=caches) for chunk in ids.split(sizes, 1)], 1)


@given(
    st.sampled_from([*MODELS.values(), POOLED_AFTER_LAYER]),
    st.lists(st.integers(1, 11), min_size=1, max_size=10),
    st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_chunked_decoding_matches_full_forward(model: Decoder, sizes: list[int], seed: int) -> None:
    ids = tokens(2, sum(sizes), seed=seed)
    torch.testing.assert_close(decode(model, ids, sizes), model(ids))


@pytest.mark.parametrize(
    "attention",
    [{"coupling": name} for name in couplings.names()] + [{"scoring": name} for name in scorings.names()],
    ids=lambda attention: next(iter(attention.values())),
)
def test_decoding_with_every_coupling_and_scoring(attention: dict[str, str]) -> None:
    model, ids = decoder(3, **attention), tokens(2, 14)
    full = model(ids)
    torch.testing.assert_close(decode(model, ids, [5] + [1] * 9), full)
    if attention.get("coupling") == "drift":
        torch.testing.assert_close(decode(merge(model), ids, [5] + [1] * 9), full)


def test_slow_blocks_run_once_per_completed_block() -> None:
    model, ids = MODELS[4], tokens(1, 31)
    calls: list[int] = []
    assert model.slow is not None
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
def test_crop_then_decode_matches_full_forward(length: int, P: int) -> None:
    model, ids, other = MODELS[P], tokens(2, 21), tokens(2, 21, seed=1)
    caches = model.new_caches(2, 21)
    decode(model, torch.cat([ids[:, :length], other[:, length:]], 1), [21], caches)
    for cache in caches:
        cache.crop(length)
    if length < 21:
        rest = decode(model, ids[:, length:], [1] * (21 - length), caches)
        torch.testing.assert_close(rest, model(ids)[:, length:])


def test_reorder_in_the_middle_of_a_block() -> None:
    model, ids, beam_idx = MODELS[4], tokens(3, 22), torch.tensor([2, 0, 0])
    caches = model.new_caches(3, 22)
    decode(model, ids[:, :10], [10], caches)
    for cache in caches:
        cache.reorder(beam_idx)
    rest = decode(model, ids[:, 10:], [1] * 12, caches)
    mixed = torch.cat([ids[beam_idx, :10], ids[:, 10:]], 1)
    torch.testing.assert_close(rest, model(mixed)[:, 10:])


def test_bf16_decoding_in_inference_mode() -> None:
    model, ids = decoder(4, torch.bfloat16), tokens(2, 15)
    with torch.inference_mode():
        torch.testing.assert_close(decode(model, ids, [1] * 15), model(ids), rtol=0.05, atol=0.05)


def test_cache_shorter_than_a_block() -> None:
    model, ids = MODELS[8], tokens(1, 6)
    caches = model.new_caches(1, 5)
    torch.testing.assert_close(decode(model, ids[:, :5], [2, 3], caches), model(ids[:, :5]))
    with raises_code("cache-full"):
        model(ids[:, 5:], caches=caches)


def test_invalid_cache_use_raises() -> None:
    model, ids = MODELS[4], tokens(2, 6)
    caches = model.new_caches(2, 6)
    with raises_code("cache-batch-mismatch"):
        model(ids[:1], caches=caches)
    mask = torch.ones_like(ids)
    torch.testing.assert_close(model(ids, attention_mask=mask, caches=model.new_caches(2, 6)), model(ids))
    mask[0, 0] = 0
    for ragged in ({"attention_mask": mask}, {"document_ids": mask}):
        with raises_code("slow-path-ragged-batch"):
            model(ids, caches=model.new_caches(2, 6), **ragged)
    with raises_code("invalid-crop-length"):
        model.new_caches(2, 6)[-1].crop(3)
