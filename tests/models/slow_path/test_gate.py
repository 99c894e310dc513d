"""`Gate`: init, forward, gradients, roles and input checks."""

from __future__ import annotations

import pytest
import torch

from input_errors import raises_code
from qkflow.models.slow_path.gate import Gate
from qkflow.roles import parameter_roles


@pytest.mark.parametrize("kind", Gate.KINDS)
@pytest.mark.parametrize("init_value", [0.0, 0.3, -0.9])
def test_init_value_and_reset(kind: str, init_value: float) -> None:
    gate = Gate(6, kind, init_value)
    x, u = torch.randn(2, 2, 5, 6)
    torch.testing.assert_close(gate(x, u), x + init_value * u)
    assert gate.value.shape == ((6,) if kind == "vector" else (1,))
    with torch.no_grad():
        gate.weight.fill_(7.0)
    gate.reset_parameters()
    torch.testing.assert_close(gate(x, u), x + init_value * u)


@pytest.mark.parametrize("kind", Gate.KINDS)
def test_gate_at_zero_has_gradient_but_passes_none(kind: str) -> None:
    gate, u = Gate(3, kind), torch.randn(2, 4, 3, requires_grad=True)
    (gate(torch.randn(2, 4, 3), u) * torch.randn(2, 4, 3)).sum().backward()
    assert gate.weight.grad is not None
    assert u.grad is not None
    assert bool((gate.weight.grad != 0).all())
    assert bool((u.grad == 0).all())


def test_vector_gate_is_per_channel_and_tanh_is_bounded() -> None:
    gate = Gate(3, "vector")
    with torch.no_grad():
        gate.weight[1] = 2.0
    assert gate(torch.zeros(3), torch.ones(3)).tolist() == [0.0, 2.0, 0.0]
    bounded = Gate(3, "tanh")
    with torch.no_grad():
        bounded.weight.fill_(50.0)
    assert bounded(torch.zeros(3), torch.ones(3)).tolist() == [1.0, 1.0, 1.0]


def test_role_and_state_dict_round_trip() -> None:
    gate, other = Gate(4, "vector", 0.5), Gate(4, "vector")
    other.load_state_dict(gate.state_dict())
    assert parameter_roles(gate) == {"weight": "gate"}
    assert torch.equal(other.value, gate.value)


def test_invalid_options_raise() -> None:
    with raises_code("unknown-gate"):
        Gate(3, "scaler")
    with raises_code("invalid-gate-init"):
        Gate(3, "tanh", 1.0)
    with raises_code("invalid-gate-init"):
        Gate(3, "vector", float("inf"))
