"""What is logged of the slow path while it trains."""

import pytest
import torch

from qkflow.models import Decoder, ModelConfig
from qkflow.timescale.measures import slow_measures

BASE = {"vocabulary": 24, "layers": 2, "width": 16, "heads": 2, "start": "fan_in"}
IDS = torch.randint(24, (2, 19), generator=torch.Generator().manual_seed(0))


def decoder(**slow):
    return Decoder(ModelConfig.from_dict({**BASE, "slow": slow or None}), seed=0)


def test_numbers_follow_their_definitions():
    model = decoder(ratio=4, layers=1, gate="vector", start=-0.5)
    with torch.no_grad():
        model.slow.gates["0"].weight[:8] = 0.25
    with torch.no_grad():
        x = model.embedding(IDS)
        spoken = model.slow.gates["0"].value * model.slow(x)
    measured = slow_measures(model, IDS)
    assert set(measured) == {"slow/gate", "slow/share"}, "no gradients yet"
    assert measured["slow/gate"] == pytest.approx(0.375)
    assert measured["slow/share"] == pytest.approx(float(spoken.norm() / x.norm()))

    model(IDS).sin().sum().backward()
    measured = slow_measures(model)
    slow = [
        p.grad for name, p in model.named_parameters() if name.startswith("slow.") and "gates" not in name
    ]
    assert measured["slow/grad_norm"] == pytest.approx(float(torch.cat([g.flatten() for g in slow]).norm()))
    assert measured["slow/gate_grad_norm"] == pytest.approx(float(model.slow.gates["0"].weight.grad.norm()))
    assert "slow/share" not in measured


def test_every_gate_is_told_apart():
    model = decoder(ratio=4, layers=1, start=0.3, inject="each")
    with torch.no_grad():
        model.slow.gates["1"].weight.fill_(0.0)
    measured = slow_measures(model, IDS)
    assert measured["slow/gate.0"] == pytest.approx(0.3)
    assert measured["slow/gate.1"] == measured["slow/share.1"] == 0
    assert measured["slow/share"] == pytest.approx(measured["slow/share.0"] / 2) != 0


def test_measuring_leaves_no_trace():
    model = decoder(ratio=4, layers=1, start=0.3)
    before = model(IDS)
    slow_measures(model, IDS, documents=torch.zeros_like(IDS))
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert not model.slow.gates["0"]._forward_hooks
    assert torch.equal(model(IDS), before)
    assert slow_measures(decoder(), IDS) == {}


def test_a_closed_gate_is_seen_as_closed():
    model = decoder(ratio=4, layers=1)
    model(IDS).sin().sum().backward()
    measured = slow_measures(model, IDS)
    assert measured["slow/gate"] == measured["slow/share"] == measured["slow/grad_norm"] == 0
    assert measured["slow/gate_grad_norm"] > 0
