"""Sampling, cached decoding, and the CPU decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from input_errors import raises_code
from qkflow.attention import couplings, scorings
from qkflow.models import Decoder, preset
from qkflow.models.cpu_decoder import CPUDecoder
from qkflow.models.generate import MIN_TOKENS_TO_PREPARE, Sampler, generate

LONG = MIN_TOKENS_TO_PREPARE + 8  # enough tokens for the CPU decoder


def small_model(dtype: torch.dtype = torch.float64, **options: Any) -> Decoder:
    config = {"vocab_size": 50, "n_layers": 2, "dim": 32, "n_heads": 4, "init": "fan_in", **options}
    return Decoder(preset("tiny", **config), seed=0, dtype=dtype)


def make_prompt(batch_size: int = 1, length: int = 5) -> Tensor:
    return torch.randint(50, (batch_size, length), generator=torch.Generator().manual_seed(0))


def generate_without_cache(model: Decoder, ids: Tensor, n_tokens: int) -> Tensor:
    for _ in range(n_tokens):
        ids = torch.cat([ids, model.logits(model(ids))[:, -1:].argmax(dim=-1)], dim=1)
    return ids


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"feed_forward": "swiglu", "tie_embeddings": False, "n_kv_heads": 2},
        {"attention": {"coupling": "leapfrog:n=2", "qk_norm": True, "window": 4}},
        {"attention": {"scoring": "differential", "rope": False}},
        {"attention": {"circuit": "CACO", "rope": False}},
        {"attention": {"bias": True}},
        {"logit_softcap": 2.0, "embedding_norm": True, "attention": {"qk_norm": True, "qk_norm_gain": 2.5}},
        {"init": "modern{out=0.5}", "tie_embeddings": False, "attention": {"rope": False}},
    ],
)
def test_cached_matches_uncached(options: dict[str, Any], batch_size: int) -> None:
    model = small_model(**options)
    ids = make_prompt(batch_size)
    tokens = generate(model, ids, LONG, temperature=0)
    assert torch.equal(tokens, generate_without_cache(model, ids, LONG))
    assert model.training


def test_generate_restores_the_mode_of_every_module() -> None:
    model = small_model()
    model.blocks[0].eval()
    generate(model, make_prompt(), 2)
    assert model.training
    assert not model.blocks[0].training
    assert model.blocks[1].training


def check_cpu_decoder(model: Decoder, length: int, n_prompt: int) -> None:
    """Compare logits after the prompt with those of the full forward, with noise on every parameter."""
    ids = make_prompt(length=length)
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
        caches = model.new_caches(1, length)
        model(ids[:, :n_prompt], caches=caches)
        decoder = CPUDecoder(model, caches)
        logits = torch.stack([decoder.logits(int(token)) for token in ids[0, n_prompt:]])
        torch.testing.assert_close(logits, model.logits(model(ids))[0, n_prompt:], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_kv_heads": 2, "attention": {"qk_norm": True}},
        {"n_kv_heads": 4, "attention": {"rope": False}},
        {"logit_softcap": 2.0, "embedding_norm": True, "attention": {"qk_norm": True, "qk_norm_gain": 2.5}},
    ],
)
@pytest.mark.parametrize("scoring", scorings.names())
@pytest.mark.parametrize("coupling", [*couplings.names(), "leapfrog:n=3:bias=true", "affine:n=3:bias=true"])
def test_cpu_decoder_matches_full_forward(coupling: str, scoring: str, options: dict[str, Any]) -> None:
    attention = {"coupling": coupling, "scoring": scoring, **options.get("attention", {})}
    model = small_model(**{**options, "attention": attention}).eval()
    check_cpu_decoder(model, length=12, n_prompt=6)


@pytest.mark.parametrize(
    "slow", [{"ratio": 2}, {"ratio": 3, "gate": "vector", "inject": "each"}, {"ratio": 3, "pool_after": 1}]
)
def test_cpu_decoder_with_slow_path(slow: dict[str, Any]) -> None:
    model = small_model(slow=slow, attention={"coupling": "leapfrog"}).eval()
    check_cpu_decoder(model, length=14, n_prompt=5)


def add_one(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
    return out + 1.0


@pytest.mark.parametrize("name", ["blocks.0", "blocks.0.feed_forward.up", "blocks.1.attention.ov.v", "norm"])
def test_forward_hooks_run_in_long_generation(name: str) -> None:
    model = small_model()
    model.get_submodule(name).register_forward_hook(add_one)
    tokens = generate(model, make_prompt(), LONG, temperature=0)
    assert torch.equal(tokens, generate_without_cache(model, make_prompt(), LONG))


def test_coupling_hooks_run_in_batched_generation() -> None:
    model, calls = small_model(attention={"coupling": "euler"}), []
    model.blocks[0].attention.coupling.register_forward_hook(lambda *args: calls.append(args))
    generate(model, make_prompt(2), 4, temperature=0)
    assert len(calls) == 4


class HalfFeedForward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("feed_forward", HalfFeedForward()),
        ("attention_norm", nn.LayerNorm(32, dtype=torch.float64)),
        ("feed_forward_norm", nn.LayerNorm(32, dtype=torch.float64)),
    ],
)
def test_replaced_modules_run_in_long_generation(name: str, module: nn.Module) -> None:
    model = small_model()
    setattr(model.blocks[1], name, module)
    tokens = generate(model, make_prompt(), LONG, temperature=0)
    assert torch.equal(tokens, generate_without_cache(model, make_prompt(), LONG))


def test_long_generation_under_autocast() -> None:
    model = small_model(torch.float32, attention={"coupling": "euler"})
    with torch.autocast("cpu", torch.bfloat16):
        tokens = generate(model, make_prompt(), LONG, temperature=0)
    assert tokens.shape == (1, 5 + LONG)


def test_long_generation_with_coupling_of_another_dtype() -> None:
    model = small_model(torch.float32, attention={"coupling": "drift"})
    for block in model.blocks:
        block.attention.coupling.double()
    tokens = generate(model, make_prompt(), LONG, temperature=0)
    assert torch.equal(tokens, generate_without_cache(model, make_prompt(), LONG))


def test_tiny_temperature_equals_argmax() -> None:
    model = small_model()
    coldest = generate(model, make_prompt(), 5, temperature=1e-40, seed=0)
    assert torch.equal(coldest, generate(model, make_prompt(), 5, temperature=0))


def test_left_padded_prompts_match_separate() -> None:
    model = small_model()
    short, long = make_prompt(length=3), make_prompt(length=7)
    ids = torch.cat([torch.cat([torch.zeros(1, 4, dtype=torch.long), short], dim=1), long])
    attention_mask = torch.tensor([[False] * 4 + [True] * 3, [True] * 7])
    tokens = generate(model, ids, 6, temperature=0, attention_mask=attention_mask)
    assert torch.equal(tokens[0, 4:], generate(model, short, 6, temperature=0)[0])
    assert torch.equal(tokens[1], generate(model, long, 6, temperature=0)[0])


def test_seed_repeats_sampling() -> None:
    model = small_model()
    runs = [generate(model, make_prompt(), LONG, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_eos_ends_a_sequence_and_on_token_gets_every_token() -> None:
    model = small_model()
    unlimited = generate(model, make_prompt(2), 12, seed=3)
    eos = int(unlimited[0, 7])  # the third new token of the first sequence
    received: list[list[int]] = []
    tokens = generate(
        model,
        make_prompt(2),
        12,
        seed=3,
        eos_token_id=eos,
        on_token=lambda token: received.append(token.tolist()),
    )
    end = int((tokens[0, 5:] == eos).nonzero()[0]) + 5
    assert (tokens[0, end:] == eos).all()
    assert torch.tensor(received).T.tolist() == tokens[:, 5:].tolist()


def test_sampling_frequencies_match_probabilities() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(4000, 4)

    def frequencies(**options: Any) -> list[float]:
        tokens = Sampler(**options, generator=torch.Generator().manual_seed(0))(logits)
        shares: list[float] = (torch.bincount(tokens, minlength=4) / len(tokens)).tolist()
        return shares

    assert frequencies() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    assert frequencies(top_k=2) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert frequencies(top_p=0.6) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert frequencies(top_k=3, top_p=0.4) == [1, 0, 0, 0]
    assert frequencies(top_p=1e-300) == [1, 0, 0, 0]  # zero in float32
    assert frequencies(temperature=0.5) == pytest.approx([0.685, 0.247, 0.062, 0.007], abs=0.03)
    assert frequencies(temperature=0) == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"temperature": -1}, "bad-temperature"),
        ({"top_k": 0}, "bad-top-k"),
        ({"top_p": 0.0}, "bad-top-p"),
        ({"max_new_tokens": 0}, "bad-max-new-tokens"),
        ({"ids": torch.tensor([[99]])}, "token-id-out-of-range"),
        ({"ids": torch.tensor([1])}, "token-ids-shape"),
        (
            {"ids": torch.tensor([[1, 2]]), "attention_mask": torch.tensor([[True, False]])},
            "attention-mask-shape",
        ),
    ],
)
def test_bad_input(options: dict[str, Any], code: str) -> None:
    with raises_code(code):
        generate(small_model(), **{"ids": make_prompt(), "max_new_tokens": 3, **options})
