"""What is logged of the slow path while it trains."""

import pytest
import torch

from qkflow.measures.slow_path import slow_path_metrics
from qkflow.models import Decoder, ModelConfig

BASE = {"vocab_size": 24, "n_layers": 2, "dim": 16, "n_heads": 2, "init": "fan_in"}
IDS = torch.randint(24, (2, 19), generator=torch.Generator().manual_seed(0))


def decoder(**slow):
    return Decoder(ModelConfig.from_dict({**BASE, "slow": slow or None}), seed=0)


def norm(parameters):
    return float(torch.cat([p.grad.flatten() for p in parameters]).norm())


def test_numbers_follow_their_definitions():
    model = decoder(ratio=4, n_layers=1, gate="vector", init=-0.5)
    with torch.no_grad():
        model.slow.gates["0"].weight[:8] = 0.25
        x = model.embedding(IDS)
        spoken = model.slow.gates["0"].value * model.slow(x)
    measured = slow_path_metrics(model, IDS)
    assert set(measured) == {"slow_gate", "slow_share"}, "no gradients yet"
    assert measured["slow_gate"] == pytest.approx([0.375])
    assert measured["slow_share"] == pytest.approx([float(spoken.norm() / x.norm())])

    model(IDS).sin().sum().backward()
    measured = slow_path_metrics(model)
    assert "slow_share" not in measured
    slow = [*model.slow.blocks.parameters(), *model.slow.phi.parameters()]
    assert measured["slow_grad_norm"] == pytest.approx(norm(slow))
    share = measured["slow_grad_share"]
    assert share == pytest.approx(norm(slow) / norm(model.parameters()))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    assert slow_path_metrics(model)["slow_grad_share"] == pytest.approx(share)


def test_every_gate_is_told_apart():
    model = decoder(ratio=4, n_layers=1, init=0.3, inject="each")
    with torch.no_grad():
        model.slow.gates["1"].weight.fill_(0.0)
    measured = slow_path_metrics(model, IDS)
    assert measured["slow_gate"] == pytest.approx([0.3, 0])
    first, second = measured["slow_share"]
    assert first > 0 == second


def test_measuring_leaves_no_trace():
    model = decoder(ratio=4, n_layers=1, init=0.3)
    before = model(IDS)
    slow_path_metrics(model, IDS, document_ids=torch.zeros_like(IDS))
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert not model.slow.gates["0"]._forward_pre_hooks
    assert torch.equal(model(IDS), before)
    assert slow_path_metrics(decoder(), IDS) == {}


def test_a_closed_gate_is_seen_as_closed():
    model = decoder(ratio=4, n_layers=1)
    model(IDS).sin().sum().backward()
    assert slow_path_metrics(model, IDS) == {
        "slow_gate": [0.0],
        "slow_share": [0.0],
        "slow_grad_norm": 0.0,
        "slow_grad_share": 0.0,
    }


def test_a_compiled_model_is_measured_too():
    model = decoder(ratio=4, n_layers=1, init=0.3)
    expected = slow_path_metrics(model, IDS)
    model.compile(backend="eager")
    model(IDS)
    assert slow_path_metrics(model, IDS) == expected
