"""Projection circuits, inits, and parameter roles."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from input_errors import raises_code
from qkflow.attention import Attention, initialize
from qkflow.attention.init import InitScheme
from qkflow.attention.projections import CIRCUITS
from qkflow.models import Decoder, preset
from qkflow.roles import ROLES, parameter_roles


def one_head(circuit: str, **options: Any) -> Attention:
    return Attention(12, 1, circuit=circuit, rope=False, dtype=torch.float64, **options)


@pytest.mark.parametrize("circuit", CIRCUITS)
def test_circuits_match_reference(circuit: str) -> None:
    layer = Attention(12, 3, circuit=circuit, rope=False, dtype=torch.float64, init="fan_in")
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    assert (layer(x) - layer.reference(x)[0]).abs().max().item() <= 1e-12


def test_collapsed_circuits_match_factorized() -> None:
    """W_QK = W_Qᵀ·W_K and W_OV = (W_O·W_V)ᵀ give the same layer in all four forms."""
    factorized = one_head("FAFO", init="fan_in")
    q, k, v, o = (
        layer.weight for layer in (factorized.qk.q, factorized.qk.k, factorized.ov.v, factorized.ov.o)
    )
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    for circuit in ("FACO", "CAFO", "CACO"):
        other = one_head(circuit)
        state = dict(factorized.state_dict())
        if circuit.startswith("CA"):
            state = {key: value for key, value in state.items() if not key.startswith("qk")}
            state["qk.weight"] = (q.T @ k)[None]
        if circuit.endswith("CO"):
            state = {key: value for key, value in state.items() if not key.startswith("ov")}
            state["ov.weight"] = (o @ v).T[None]
        other.load_state_dict(state)
        torch.testing.assert_close(other(x), factorized(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("circuit", CIRCUITS)
@pytest.mark.parametrize("scoring", ["softmax", "differential"])
def test_every_parameter_has_a_role(circuit: str, scoring: str) -> None:
    if circuit != "FAFO" and scoring != "softmax":
        with raises_code("collapsed-circuit-scoring"):
            Attention(12, 2, circuit=circuit, rope=False, scoring=scoring)
        return
    layer = Attention(12, 2, circuit=circuit, rope=False, scoring=scoring, coupling="euler")
    roles = parameter_roles(layer)
    assert set(roles) == {name for name, _ in layer.named_parameters()}
    assert set(roles.values()) <= set(ROLES)
    assert roles["coupling.network.w1"] == "coupling"
    assert ("q" in roles.values()) == circuit.startswith("FA")


def test_missing_role_is_an_error() -> None:
    model = Decoder(preset("tiny", vocab_size=8, n_layers=1), seed=0)
    model.extra = torch.nn.Parameter(torch.zeros(1))
    with raises_code("missing-role"):
        parameter_roles(model)


def test_roles_survive_deepcopy() -> None:
    model = Decoder(preset("tiny", vocab_size=8, n_layers=1, attention={"coupling": "euler"}), seed=0)
    assert parameter_roles(copy.deepcopy(model)) == parameter_roles(model)


def test_gpt2_init_std() -> None:
    layer = Attention(256, 4, init="gpt2", n_layers=8, seed=0)
    assert layer.qk.q.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert layer.ov.v.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert layer.ov.o.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)


def test_fan_in_init_std() -> None:
    layer = Attention(256, 4, init="fan_in", seed=0)
    for linear in (layer.qk.q, layer.qk.k, layer.ov.v, layer.ov.o):
        assert linear.weight.std().item() == pytest.approx(0.7 / 16, rel=0.02)


@pytest.mark.parametrize("base", ["gpt2", "fan_in"])
@pytest.mark.parametrize("n_kv_heads", [4, 2])
def test_symmetric_init_adds_key_to_query(base: str, n_kv_heads: int) -> None:
    plain = Attention(32, 4, n_kv_heads=n_kv_heads, init=base, seed=3)
    symmetric = Attention(32, 4, n_kv_heads=n_kv_heads, init=f"{base}+symmetric=2", seed=3)
    keys = plain.qk.k.weight.view(n_kv_heads, 8, 32).repeat_interleave(4 // n_kv_heads, dim=0).reshape(32, 32)
    torch.testing.assert_close(symmetric.qk.q.weight, plain.qk.q.weight + 2 * keys)
    for name in ("qk.k.weight", "ov.v.weight", "ov.o.weight"):
        assert torch.equal(symmetric.get_parameter(name), plain.get_parameter(name))


@pytest.mark.parametrize("n_kv_heads", [1, 2])
def test_mimetic_init_is_near_identity(n_kv_heads: int) -> None:
    """Trockman & Kolter: W_Qᵀ·W_K near a positive multiple of I, W_O·W_V near a negative one."""
    dim = 64
    layer = Attention(
        dim, 2, n_kv_heads=n_kv_heads, head_dim=dim, init="mimetic", seed=0, dtype=torch.float64
    )
    queries = layer.qk.q.weight.view(2, dim, dim)
    keys = layer.qk.k.weight.view(n_kv_heads, dim, dim).repeat_interleave(2 // n_kv_heads, dim=0)
    for q, k in zip(queries, keys, strict=True):
        product = q.T @ k
        assert product.diagonal().mean().item() == pytest.approx(0.7, abs=0.1)
        off_diagonal = product - product.diagonal().diag()
        assert off_diagonal.std().item() == pytest.approx(0.7 / dim**0.5, rel=0.1)
    values = layer.ov.v.weight.view(n_kv_heads, dim, dim).repeat_interleave(2 // n_kv_heads, dim=0)
    outputs = layer.ov.o.weight.view(dim, 2, dim)
    ov = sum(outputs[:, h] @ values[h] for h in range(2))
    assert ov.diagonal().mean().item() == pytest.approx(-0.4, abs=0.1)


def test_scaled_identity_init() -> None:
    layer = one_head("FAFO", init="scaled_identity")
    for weight in (layer.qk.q.weight, layer.qk.k.weight, layer.ov.v.weight, layer.ov.o.weight):
        torch.testing.assert_close(weight, 1e-6 * torch.eye(12, dtype=torch.float64), rtol=0, atol=0)
    weight = one_head("CACO", init="scaled_identity", seed=0).qk.weight
    assert weight.abs().max().item() <= 12**-0.5
    assert weight.std().item() == pytest.approx((12 * 3) ** -0.5, rel=0.15)


def test_variants_share_init_of_common_parameters() -> None:
    """Paired comparisons need this: an option of one part changes no parameter of another."""
    plain = Decoder(preset("tiny", vocab_size=64), seed=5)
    for attention in ({"coupling": "euler"}, {"coupling": "affine:n=2"}, {"qk_norm": True}):
        other = Decoder(preset("tiny", vocab_size=64, attention=attention), seed=5)
        for name, parameter in plain.named_parameters():
            assert torch.equal(parameter, other.get_parameter(name)), name
    different = Decoder(preset("tiny", vocab_size=64), seed=6)
    assert not torch.equal(plain.embedding.weight, different.embedding.weight)


def test_init_does_not_depend_on_dtype() -> None:
    rough, exact = (Attention(16, 2, seed=0, dtype=dtype) for dtype in (torch.float32, torch.float64))
    torch.testing.assert_close(rough.qk.q.weight.double(), exact.qk.q.weight, rtol=1e-6, atol=0)


def test_default_seed_uses_global_generator() -> None:
    torch.manual_seed(1)
    first, second = Attention(8, 2), Attention(8, 2)
    assert not torch.equal(first.qk.q.weight, second.qk.q.weight)
    torch.manual_seed(1)
    assert torch.equal(Attention(8, 2).qk.q.weight, first.qk.q.weight)


def test_initialize_resets_parameters() -> None:
    model = Decoder(preset("tiny", vocab_size=8, n_layers=2), seed=0)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    initialize(model, "fan_in", seed=0, n_layers=2)
    assert not torch.equal(model.embedding.weight, before["embedding.weight"])
    initialize(model, "gpt2", seed=0, n_layers=2)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])


@pytest.mark.parametrize(
    ("text", "scheme"),
    [
        ("gpt2", InitScheme("gpt2")),
        ("fan_in", InitScheme("fan_in")),
        ("symmetric", InitScheme("fan_in", "symmetric", 1.0)),
        ("symmetric(3)", InitScheme("fan_in", "symmetric", 3.0)),
        ("gpt2+symmetric(c=0.5)", InitScheme("gpt2", "symmetric", 0.5)),
        ("fan_in+symmetric=2", InitScheme("fan_in", "symmetric", 2.0)),
        ("mimetic", InitScheme("gpt2", "mimetic", 0.7)),
        ("fan_in + mimetic", InitScheme("fan_in", "mimetic", 0.7)),
        ("scaled_identity=0.1", InitScheme("gpt2", "scaled_identity", 0.1)),
    ],
)
def test_init_scheme_parse_round_trip(text: str, scheme: InitScheme) -> None:
    assert InitScheme.parse(text) == scheme
    assert InitScheme.parse(str(scheme)) == scheme
