"""The circuits' measures against their definitions, and what gradient flow conserves."""

from __future__ import annotations

import pytest
import torch

from qkflow.attention import Attention
from qkflow.measures.circuits import (
    CircuitTracker,
    attention_mass,
    attention_modules,
    circuit_metrics,
    layer_circuits,
)
from qkflow.models import Decoder, ModelConfig

BASE = {"vocab_size": 24, "n_layers": 2, "dim": 16, "n_heads": 4, "init": "fan_in"}


def decoder(**changes: object) -> Decoder:
    return Decoder(ModelConfig.from_dict({**BASE, **changes}), seed=0)


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_singular_values_are_those_of_each_heads_circuit(kv_heads: int) -> None:
    layer = Attention(16, n_heads=4, n_kv_heads=kv_heads, init="fan_in", seed=0)
    found = layer_circuits(layer)
    q, k = (part.weight.unflatten(0, (-1, 4)) for part in (layer.qk.q, layer.qk.k))
    v, o = layer.ov.v.weight.unflatten(0, (-1, 4)), layer.ov.o.weight.unflatten(1, (-1, 4))
    for head in range(4):
        shared = head // (4 // kv_heads)
        qk, ov = q[head].T @ k[shared], o[:, head] @ v[shared]
        torch.testing.assert_close(found.qk[head], torch.linalg.svdvals(qk)[:4], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found.ov[head], torch.linalg.svdvals(ov)[:4], rtol=1e-4, atol=1e-6)
        assert found.frobenius_norms("qk")[head] == pytest.approx(float(qk.detach().norm()), rel=1e-5)


@pytest.mark.parametrize("circuit", ["FACO", "CAFO", "CACO"])
def test_collapsed_circuits_are_measured_as_they_stand(circuit: str) -> None:
    layer = Attention(8, n_heads=2, circuit=circuit, rope=False, init="fan_in", seed=0)
    found = layer_circuits(layer)
    if circuit.startswith("CA"):
        torch.testing.assert_close(found.frobenius_norms("qk"), layer.qk.weight.flatten(1).norm(dim=1))
    if circuit.endswith("CO"):
        torch.testing.assert_close(found.frobenius_norms("ov"), layer.ov.weight.flatten(1).norm(dim=1))
        assert found.balance is None
    else:
        assert found.balance is not None


def test_a_run_logs_a_value_per_layer_of_the_main_path() -> None:
    found = circuit_metrics(decoder(slow={"ratio": 4, "n_layers": 1}))
    assert set(found) == {
        *(f"{circuit}_{what}" for circuit in ("qk", "ov") for what in ("scale", "largest", "rank")),
        "ov_balance",
    }
    assert all(len(values) == 2 for values in found.values())
    assert all(1 <= rank <= 4 for rank in found["qk_rank"])


def test_differential_scoring_has_circuits_too() -> None:
    found = circuit_metrics(decoder(attention={"scoring": "differential"}))
    assert all(len(values) == 2 and min(values) > 0 for values in found.values())


def test_pace_is_the_ratio_of_relative_ways() -> None:
    model = decoder()
    watch = CircuitTracker(model)
    assert watch.metrics(model) == {"qk_change": 0.0, "ov_change": 0.0}
    with torch.no_grad():
        for layer in attention_modules(model):
            for parameter in layer.qk.parameters():
                parameter.mul_(1.3)
            for parameter in layer.ov.parameters():
                parameter.mul_(1.1)
    found = watch.metrics(model)
    assert found["qk_change"] == pytest.approx(0.3, rel=1e-4)
    assert found["effective_pace"] == pytest.approx(3, rel=1e-4)


@pytest.mark.parametrize("n_kv_heads", [2, 1])
def test_gradient_descent_with_small_steps_keeps_the_balance(kv_heads: int) -> None:
    layer = Attention(8, n_heads=2, n_kv_heads=kv_heads, init="fan_in", seed=0).double()
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    target = torch.randn(4, 6, 8, dtype=torch.float64)

    def way(lr: float, steps: int) -> tuple[float, float]:
        """How far the balance and the values went."""
        copy = Attention(8, n_heads=2, n_kv_heads=kv_heads, init="fan_in", seed=0).double()
        before, value = layer_circuits(copy).balance, copy.ov.v.weight.detach().clone()
        for _ in range(steps):
            copy.zero_grad()
            (copy(x) - target).square().sum().backward()
            with torch.no_grad():
                for parameter in copy.parameters():
                    parameter.sub_(parameter.grad, alpha=lr)
        return float((layer_circuits(copy).balance - before).norm()), float((copy.ov.v.weight - value).norm())

    assert layer_circuits(layer).balance is not None
    coarse, moved = way(1e-3, 100)
    fine, _ = way(1e-4, 1000)
    assert moved > 0.1, "it has learnt"
    assert fine < 0.15 * coarse, "what is left is the step's error, linear in the rate"


def test_mass_on_chosen_tokens() -> None:
    model = decoder()
    ids = torch.randint(24, (2, 6))
    real = torch.ones(2, 6, dtype=torch.bool)
    real[1, 4:] = False
    chosen = torch.zeros(2, 6, dtype=torch.bool)
    chosen[:, 0] = True
    first = attention_mass(model, ids, chosen, real)
    rest = attention_mass(model, ids, ~chosen & real, real)
    assert len(first) == 2
    for one, other in zip(first, rest, strict=True):
        assert one.shape == (2, 4, 6)
        torch.testing.assert_close(one[:, :, 0], torch.ones(2, 4))  # the first token sees itself alone
        torch.testing.assert_close((one + other)[1, :, :4], torch.ones(4, 4))
