"""Circuit measures against their definitions, and the balance that gradient flow conserves."""

from __future__ import annotations

import pytest
import torch

from qkflow.attention import Attention
from qkflow.measures.circuits import (
    CircuitTracker,
    attention_mass,
    attention_modules,
    circuit_metrics,
    directionality_score,
    layer_circuits,
    symmetry_score,
)
from qkflow.models import Decoder, ModelConfig, preset

BASE = {"vocab_size": 24, "n_layers": 2, "dim": 16, "n_heads": 4, "init": "fan_in"}


def decoder(**changes: object) -> Decoder:
    return Decoder(ModelConfig.from_dict({**BASE, **changes}), seed=0)


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_singular_values_match_head_circuits(n_kv_heads: int) -> None:
    layer = Attention(16, n_heads=4, n_kv_heads=n_kv_heads, init="fan_in", seed=0)
    measured = layer_circuits(layer)
    q, k = (part.weight.unflatten(0, (-1, 4)) for part in (layer.qk.q, layer.qk.k))
    v, o = layer.ov.v.weight.unflatten(0, (-1, 4)), layer.ov.o.weight.unflatten(1, (-1, 4))
    for head in range(4):
        shared = head // (4 // n_kv_heads)
        qk, ov = q[head].T @ k[shared], o[:, head] @ v[shared]
        torch.testing.assert_close(measured.qk[head], torch.linalg.svdvals(qk)[:4], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(measured.ov[head], torch.linalg.svdvals(ov)[:4], rtol=1e-4, atol=1e-6)
        assert measured.frobenius_norms("qk")[head] == pytest.approx(float(qk.detach().norm()), rel=1e-5)


@pytest.mark.parametrize("circuit", ["FACO", "CAFO", "CACO"])
def test_collapsed_circuits(circuit: str) -> None:
    layer = Attention(8, n_heads=2, circuit=circuit, rope=False, init="fan_in", seed=0)
    measured = layer_circuits(layer)
    if circuit.startswith("CA"):
        torch.testing.assert_close(measured.frobenius_norms("qk"), layer.qk.weight.flatten(1).norm(dim=1))
    if circuit.endswith("CO"):
        torch.testing.assert_close(measured.frobenius_norms("ov"), layer.ov.weight.flatten(1).norm(dim=1))
        assert measured.balance is None
    else:
        assert measured.balance is not None


def test_circuit_metrics_have_a_value_per_fast_layer() -> None:
    measured = circuit_metrics(decoder(slow={"ratio": 4, "n_layers": 1}))
    assert set(measured) == {
        *(f"{circuit}_{what}" for circuit in ("qk", "ov") for what in ("scale", "largest", "rank")),
        *("ov_balance", "qk_symmetry", "qk_directionality"),
    }
    assert all(len(values) == 2 for values in measured.values())
    assert all(1 <= rank <= 4 for rank in measured["qk_rank"])


def test_circuit_metrics_with_differential_scoring() -> None:
    measured = circuit_metrics(decoder(attention={"scoring": "differential"}))
    assert all(len(values) == 2 for values in measured.values())
    assert all(min(values) > 0 for name, values in measured.items() if name.endswith(("scale", "rank")))


def test_effective_pace_is_the_ratio_of_relative_changes() -> None:
    model = decoder()
    tracker = CircuitTracker(model)
    assert tracker.metrics(model) == {"qk_change": 0.0, "ov_change": 0.0}
    with torch.no_grad():
        for layer in attention_modules(model):
            for parameter in layer.qk.parameters():
                parameter.mul_(1.3)
            for parameter in layer.ov.parameters():
                parameter.mul_(1.1)
    measured = tracker.metrics(model)
    assert measured["qk_change"] == pytest.approx(0.3, rel=1e-4)
    assert measured["effective_pace"] == pytest.approx(3, rel=1e-4)


@pytest.mark.parametrize("n_kv_heads", [2, 1])
def test_small_step_gradient_descent_conserves_balance(n_kv_heads: int) -> None:
    layer = Attention(8, n_heads=2, n_kv_heads=n_kv_heads, init="fan_in", seed=0).double()
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    target = torch.randn(4, 6, 8, dtype=torch.float64)

    def change(lr: float, steps: int) -> tuple[float, float]:
        """Norms of the change of the balance and of the values."""
        copy = Attention(8, n_heads=2, n_kv_heads=n_kv_heads, init="fan_in", seed=0).double()
        before, value = layer_circuits(copy).balance, copy.ov.v.weight.detach().clone()
        for _ in range(steps):
            copy.zero_grad()
            (copy(x) - target).square().sum().backward()
            with torch.no_grad():
                for parameter in copy.parameters():
                    parameter.sub_(parameter.grad, alpha=lr)
        return float((layer_circuits(copy).balance - before).norm()), float(
            (copy.ov.v.weight.detach() - value).norm()
        )

    assert layer_circuits(layer).balance is not None
    coarse, moved = change(1e-3, 100)
    fine, _ = change(1e-4, 1000)
    assert moved > 0.1
    assert fine < 0.15 * coarse, "the discretization error is linear in the learning rate"


def test_attention_mass_on_selected_tokens() -> None:
    model = decoder()
    ids = torch.randint(24, (2, 6))
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1, 4:] = False
    selected = torch.zeros(2, 6, dtype=torch.bool)
    selected[:, 0] = True
    first = attention_mass(model, ids, selected, mask)
    rest = attention_mass(model, ids, ~selected & mask, mask)
    assert len(first) == 2
    for one, other in zip(first, rest, strict=True):
        assert one.shape == (2, 4, 6)
        torch.testing.assert_close(one[:, :, 0], torch.ones(2, 4))  # the first query sees the first key only
        torch.testing.assert_close((one + other)[1, :, :4], torch.ones(4, 4))


def test_symmetry_and_directionality_scores() -> None:
    random = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    assert symmetry_score(random + random.mT) == pytest.approx(1)
    assert symmetry_score(random - random.mT) == pytest.approx(-1)
    assert abs(symmetry_score(random)) < 0.1
    assert symmetry_score(torch.zeros(4, 4)) == 0
    random[:, 3] = 20
    assert directionality_score(random) > 0.9
    assert directionality_score(random.mT) < -0.9


def test_symmetric_init_is_symmetric() -> None:
    scores = {
        init: circuit_metrics(Decoder(preset("tiny", init=init), seed=0))["qk_symmetry"][0]
        for init in ("fan_in", "fan_in+symmetric=1", "fan_in+tied_qk", "fan_in+symmetric=-1")
    }
    assert scores["fan_in+tied_qk"] == pytest.approx(1)
    assert scores["fan_in+symmetric=1"] > 0.4 > scores["fan_in"] > -0.4 > -scores["fan_in+symmetric=1"]
