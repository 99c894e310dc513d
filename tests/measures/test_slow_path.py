"""Metrics of the slow path in a training log."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from qkflow.measures.slow_path import slow_path_metrics
from qkflow.models import Decoder, ModelConfig

BASE = {"vocab_size": 24, "n_layers": 2, "dim": 16, "n_heads": 2, "init": "fan_in"}
IDS = torch.randint(24, (2, 19), generator=torch.Generator().manual_seed(0))


def decoder(**slow: Any) -> Any:
    return Decoder(ModelConfig.from_dict({**BASE, "slow": slow or None}), seed=0)


def grad_norm(parameters: Iterable[nn.Parameter]) -> float:
    return float(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).norm())


def test_metrics_match_definitions() -> None:
    model = decoder(ratio=4, n_layers=1, gate="vector", gate_init=-0.5)
    with torch.no_grad():
        model.slow.gates["0"].weight[:8] = 0.25
        x = model.embedding(IDS)
        gated = model.slow.gates["0"].value * model.slow(x)
    measured = slow_path_metrics(model, IDS)
    assert set(measured) == {"slow_gate", "slow_share"}
    assert measured["slow_gate"] == pytest.approx([0.375])
    assert measured["slow_share"] == pytest.approx([float(gated.norm() / x.norm())])

    model(IDS).sin().sum().backward()
    measured = slow_path_metrics(model)
    assert "slow_share" not in measured
    slow = [*model.slow.blocks.parameters(), *model.slow.phi.parameters()]
    assert measured["slow_grad_norm"] == pytest.approx(grad_norm(slow))
    share = measured["slow_grad_share"]
    assert share == pytest.approx(grad_norm(slow) / grad_norm(model.parameters()))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    assert slow_path_metrics(model)["slow_grad_share"] == pytest.approx(share)


def test_metrics_have_a_value_per_gate() -> None:
    model = decoder(ratio=4, n_layers=1, gate_init=0.3, inject="each")
    with torch.no_grad():
        model.slow.gates["1"].weight.fill_(0.0)
    measured = slow_path_metrics(model, IDS)
    assert measured["slow_gate"] == pytest.approx([0.3, 0])
    first, second = measured["slow_share"]
    assert first > 0 == second


def test_metrics_leave_the_model_unchanged() -> None:
    model = decoder(ratio=4, n_layers=1, gate_init=0.3)
    before = model(IDS)
    slow_path_metrics(model, IDS, document_ids=torch.zeros_like(IDS))
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert not model.slow.gates["0"]._forward_pre_hooks
    assert torch.equal(model(IDS), before)
    assert slow_path_metrics(decoder(), IDS) == {}


def test_metrics_of_a_closed_gate() -> None:
    model = decoder(ratio=4, n_layers=1)
    model(IDS).sin().sum().backward()
    assert slow_path_metrics(model, IDS) == {
        "slow_gate": [0.0],
        "slow_share": [0.0],
        "slow_grad_norm": 0.0,
        "slow_grad_share": 0.0,
    }


def test_metrics_of_a_compiled_model() -> None:
    model = decoder(ratio=4, n_layers=1, gate_init=0.3)
    expected = slow_path_metrics(model, IDS)
    model.compile(backend="eager")
    model(IDS)
    assert slow_path_metrics(model, IDS) == expected
