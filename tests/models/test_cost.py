"""Parameter counts and FLOPs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from input_errors import raises_code
from qkflow.attention import couplings, scorings
from qkflow.models import Decoder, ModelConfig, preset
from qkflow.models.cost import (
    build_meta_decoder,
    check_memory,
    count_flops,
    flops_per_token,
    parameters_by_role,
)
from qkflow.models.loss import linear_cross_entropy_reference
from qkflow.models.presets import PRESETS
from qkflow.studies.config import PresetName


def small_config(**options: Any) -> ModelConfig:
    return preset("tiny", vocab_size=64, n_layers=2, dim=32, n_heads=4, **options)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("tiny", 1.05), ("small", 10.5), ("60m", 59.29), ("150m", 151.86), ("350m", 353.5), ("455m", 454.2)],
)
def test_preset_sizes(name: str, millions: float) -> None:
    counts = parameters_by_role(build_meta_decoder(preset(name)))
    assert sum(counts.values()) / 1e6 == pytest.approx(millions, rel=2e-3)


@pytest.mark.parametrize("name", ["tiny", "350m"])
def test_swiglu_twins_have_the_same_size(name: str) -> None:
    ours, twin = preset(name), preset(f"{name}-swiglu")
    assert (ours.feed_forward, twin.feed_forward) == ("gelu", "swiglu")
    assert (ours.n_layers, ours.dim, ours.n_heads) == (twin.n_layers, twin.dim, twin.n_heads)
    counts = [sum(parameters_by_role(build_meta_decoder(config)).values()) for config in (ours, twin)]
    assert counts[1] == pytest.approx(counts[0], rel=2e-3)


def test_studies_know_every_preset() -> None:
    assert set(get_args(PresetName)) == PRESETS.keys()


@pytest.mark.parametrize("scoring", scorings.names())
@pytest.mark.parametrize("coupling", couplings.names())
def test_counts_of_a_config_match_the_model(coupling: str, scoring: str) -> None:
    config = small_config(attention={"coupling": coupling, "scoring": scoring})
    model = Decoder(config, seed=0)
    assert sum(parameters_by_role(model).values()) == sum(p.numel() for p in model.parameters())
    assert parameters_by_role(model) == parameters_by_role(build_meta_decoder(config))
    assert flops_per_token(config, 16) == flops_per_token(model, 16)


def test_flops_of_a_deep_config_match_the_model() -> None:
    config = preset(
        "tiny", vocab_size=64, n_layers=4, dim=32, n_heads=4, attention={"scoring": "differential"}
    )
    assert flops_per_token(config, 16) == flops_per_token(Decoder(config, device="meta"), 16)


def test_flops_of_the_standard_model_match_formula() -> None:
    n_layers, dim, vocab_size, seq_len = 2, 32, 64, 16
    weights = n_layers * (4 * dim**2 + 8 * dim**2) + vocab_size * dim  # multiply-adds per token
    attention = n_layers * 2 * seq_len * dim  # scores and weighted values, over all pairs of tokens
    assert flops_per_token(small_config(), seq_len) == 6 * (weights + attention)
    assert flops_per_token(small_config(), seq_len, training=False) == 2 * (weights + attention)


def test_flops_of_a_coupling_match_its_formula() -> None:
    plain, coupled = small_config(), small_config(attention={"coupling": "leapfrog:n=3"})
    model = Decoder(coupled, seed=0)
    extra = flops_per_token(coupled, 256) - flops_per_token(plain, 256)
    # forward and backward; W1·W2 is computed once for all tokens
    by_formula = 3 * sum(block.attention.coupling.extra_flops() for block in model.blocks)
    assert by_formula <= extra <= 1.5 * by_formula


def test_flops_of_a_linear_layer() -> None:
    layer = torch.nn.Linear(8, 16, bias=False)
    assert count_flops(lambda: layer(torch.randn(4, 8))) == 2 * 4 * 8 * 16


def test_flops_include_fused_attention() -> None:
    q = torch.randn(1, 2, 8, 4, requires_grad=True)
    forward = 2 * 2 * 2 * 8 * 8 * 4

    def forward_and_backward() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()

    assert count_flops(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q)) == forward
    assert count_flops(forward_and_backward) == forward + 2 * forward  # recomputed scores are not counted


@pytest.mark.parametrize("scoring", ["softmax", "differential"])
def test_flops_match_the_counter_of_pytorch(scoring: str) -> None:
    model = Decoder(small_config(attention={"coupling": "euler", "scoring": scoring}), device="meta")
    ids = torch.zeros(1, 32, dtype=torch.long, device="meta")
    # the counter of PyTorch knows neither the fused kernel of a CPU nor matmuls in place
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        linear_cross_entropy_reference(model(ids), model.output_weight, ids).backward()
    assert flops_per_token(model, 32) * 32 == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_meta_decoder_allocates_nothing() -> None:
    assert all(p.is_meta for p in build_meta_decoder(preset("455m")).parameters())


def test_models_larger_than_the_memory_are_refused() -> None:
    config = preset("tiny", vocab_size=64)
    check_memory(config)
    with raises_code("out-of-memory"):
        check_memory(replace(config, dim=2**19, n_heads=2))
