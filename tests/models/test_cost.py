import pytest

from qkflow.attention import couplings, scorings
from qkflow.models import Decoder, ModelConfig, preset
from qkflow.models.cost import (
    build_meta_decoder,
    estimate_training_memory,
    flops_per_token,
    parameters_by_role,
    saved_activation_bytes,
)


def config(**options) -> ModelConfig:
    return preset("tiny", vocab_size=64, n_layers=2, dim=32, n_heads=4, **options)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("tiny", 1.05), ("small", 10.5), ("60m", 59.29), ("150m", 151.86), ("350m", 353.5), ("455m", 454.2)],
)
def test_presets_have_the_sizes_they_are_named_for(name, millions):
    counts = parameters_by_role(build_meta_decoder(preset(name)))
    assert sum(counts.values()) / 1e6 == pytest.approx(millions, rel=2e-3)


@pytest.mark.parametrize("scoring", scorings.names())
@pytest.mark.parametrize("coupling", couplings.names())
def test_every_part_is_accounted_for(coupling, scoring):
    described = config(attention={"coupling": coupling, "scoring": scoring})
    model = Decoder(described, seed=0)
    assert sum(parameters_by_role(model).values()) == sum(p.numel() for p in model.parameters())
    assert parameters_by_role(model) == parameters_by_role(build_meta_decoder(described))
    assert flops_per_token(described, 16) == flops_per_token(model, 16)  # counted on shapes and on numbers


def test_flops_of_the_standard_model_by_hand():
    layers, width, vocabulary, length = 2, 32, 64, 16
    products = layers * (4 * width**2 + 8 * width**2) + vocabulary * width  # weights that multiply a token
    attention = layers * 2 * length * width  # multiply-adds with every other token, for scores and for values
    assert flops_per_token(config(), length) == 6 * (products + attention)
    assert flops_per_token(config(), length, training=False) == 2 * (products + attention)


def test_a_coupling_costs_its_own_formula():
    plain, coupled = config(), config(attention={"coupling": "leapfrog:n=3"})
    model = Decoder(coupled, seed=0)
    extra = flops_per_token(coupled, 256) - flops_per_token(plain, 256)
    # a forward and a backward pass; W1·W2 is made once for all tokens, and some steps are made again
    by_formula = 3 * sum(block.attention.coupling.extra_flops() for block in model.blocks)
    assert by_formula <= extra <= 1.5 * by_formula


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("coupling", ["none", "leapfrog:n=3"])
def test_memory_is_what_a_step_really_keeps(coupling, precision):
    described = config(attention={"coupling": coupling})
    model = Decoder(described, seed=0)
    foreseen = estimate_training_memory(described, 4, 16, precision=precision)
    assert foreseen.activations == saved_activation_bytes(model, 4, 16, precision)
    assert foreseen.weights == 4 * sum(p.numel() for p in model.parameters())
    assert foreseen.total == foreseen.activations + 4 * foreseen.weights + foreseen.logits


def test_recomputing_blocks_keeps_less():
    deep = config()
    assert (
        estimate_training_memory(deep, 4, 16, activation_checkpointing=True).activations
        < estimate_training_memory(deep, 4, 16).activations
    )


def test_nothing_is_allocated():
    assert all(p.is_meta for p in build_meta_decoder(preset("455m")).parameters())
