"""The gate: what it starts as, and what it lets through."""

import pytest
import torch

from qkflow.errors import InputError
from qkflow.models.slow_path.gate import Gate
from qkflow.roles import parameter_roles


@pytest.mark.parametrize("kind", Gate.KINDS)
@pytest.mark.parametrize("start", [0.0, 0.3, -0.9])
def test_a_gate_starts_where_it_is_told(kind, start):
    gate = Gate(6, kind, start)
    x, u = torch.randn(2, 2, 5, 6)
    torch.testing.assert_close(gate(x, u), x + start * u)
    assert gate.value.shape == ((6,) if kind == "vector" else (1,))
    with torch.no_grad():
        gate.weight.fill_(7.0)
    gate.reset_parameters()
    torch.testing.assert_close(gate(x, u), x + start * u)


@pytest.mark.parametrize("kind", Gate.KINDS)
def test_a_closed_gate_learns_but_passes_no_gradient(kind):
    gate, u = Gate(3, kind), torch.randn(2, 4, 3, requires_grad=True)
    (gate(torch.randn(2, 4, 3), u) * torch.randn(2, 4, 3)).sum().backward()
    assert bool((gate.weight.grad != 0).all())
    assert bool((u.grad == 0).all())


def test_channels_of_a_vector_gate_open_alone_and_tanh_stays_bounded():
    gate = Gate(3, "vector")
    with torch.no_grad():
        gate.weight[1] = 2.0
    assert gate(torch.zeros(3), torch.ones(3)).tolist() == [0.0, 2.0, 0.0]
    bounded = Gate(3, "tanh")
    with torch.no_grad():
        bounded.weight.fill_(50.0)
    assert bounded(torch.zeros(3), torch.ones(3)).tolist() == [1.0, 1.0, 1.0]


def test_its_parameter_belongs_to_the_gate_role_and_survives_a_state_dict():
    gate, other = Gate(4, "vector", 0.5), Gate(4, "vector")
    other.load_state_dict(gate.state_dict())
    assert parameter_roles(gate) == {"weight": "gate"}
    assert torch.equal(other.value, gate.value)


def test_bad_gates_are_refused():
    with pytest.raises(InputError, match="did you mean 'scalar'"):
        Gate(3, "scaler")
    with pytest.raises(InputError, match=r"inside \(-1, 1\)"):
        Gate(3, "tanh", 1.0)
    with pytest.raises(InputError, match="finite"):
        Gate(3, "vector", float("inf"))
