"""Contract of every registered coupling: it has the properties that it declares."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from input_errors import raises_code
from parts import HEADS, coupling_specs, heads, scatter
from qkflow.attention import couplings
from qkflow.attention.couplings import Coupling
from qkflow.attention.init import initialize
from qkflow.attention.projections import FactorizedQK, HeadShapes
from qkflow.models.cost import count_flops

SPECS = coupling_specs()
DOUBLE = {"dtype": torch.float64}
CouplingForm = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def make(
    spec: str, kind: str = "mha", size: int = 6, init: str = "fan_in", perturbed: bool = True
) -> Coupling:
    coupling = couplings.build(spec, heads(kind, size), DOUBLE)
    initialize(coupling, init, seed=0)
    if perturbed:
        scatter(coupling)
    return coupling


def tokens(shape: HeadShapes, batch: int = 2, length: int = 5) -> tuple[Tensor, Tensor]:
    q = torch.randn(batch, length, shape.n_q, shape.head_dim, dtype=torch.float64)
    k = torch.randn(batch, length, shape.n_k, shape.head_dim, dtype=torch.float64)
    return q, k


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("spec", SPECS)
def test_forward_and_backward_match_reference(spec: str, kind: str) -> None:
    coupling = make(spec, kind)
    q, k = (t.requires_grad_() for t in tokens(coupling.head_shapes))
    inputs = [q, k, *coupling.parameters()]
    signal = [torch.randn_like(q), torch.randn_like(k)]

    def run(form: CouplingForm) -> tuple[tuple[Tensor, Tensor], tuple[Tensor | None, ...]]:
        out = form(q, k)
        return out, torch.autograd.grad(out, inputs, signal, allow_unused=True)

    (fast, fast_grads), (slow, slow_grads) = run(coupling), run(coupling.reference)
    for a, b in zip((*fast, *fast_grads), (*slow, *slow_grads), strict=True):
        if b is None:
            assert a is None
        else:
            scale = b.abs().max().clamp_min(1.0)
            assert ((a - b).abs().max() / scale).item() <= 1e-12


@pytest.mark.parametrize("spec", SPECS)
def test_strided_and_empty_inputs(spec: str) -> None:
    coupling = make(spec, "gqa")
    qk = tokens(coupling.head_shapes, batch=2, length=3)
    layouts = [tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in qk)]  # (B, H, T, D)
    layouts += [tuple(x.transpose(0, 1).contiguous().transpose(0, 1) for x in qk)]  # (T, B, H, D)
    layouts += [tuple(x[:1].expand(2, -1, -1, -1) for x in qk), tuple(x[:, :0] for x in qk)]
    for q, k in layouts:
        inputs = [q.detach().requires_grad_(), k.detach().requires_grad_(), *coupling.parameters()]
        runs = []
        for form in (coupling, coupling.reference):
            out = form(*inputs[:2])
            signal = [x.detach().cos() for x in out]
            runs.append((*out, *torch.autograd.grad(out, inputs, signal, materialize_grads=True)))
        for a, b in zip(*runs, strict=True):
            scale = max(1.0, b.abs().max().item()) if b.numel() else 1.0
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11 * scale)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("spec", SPECS)
def test_prepared_projection_equals_project_then_couple(spec: str, kind: str, bias: bool) -> None:
    coupling = make(spec, kind)
    qk = FactorizedQK(10, coupling.head_shapes, bias, dtype=torch.float64)
    scatter(qk, 0.3)
    with torch.no_grad():
        prepared = coupling.prepare_for_inference(qk)
        assert prepared is not None
        for batch, length in ((1, 1), (2, 3), (1, 100)):
            # halved: seven affine steps amplify rounding of large inputs
            x = torch.randn(batch, length, 10, dtype=torch.float64).div_(2)
            *fast, _ = prepared(x)
            for a, b in zip(fast, coupling.reference(*qk(x, x)), strict=True):
                assert a.shape == b.shape
                assert ((a - b).abs().max() / b.abs().max().clamp_min(1.0)).item() <= 1e-12


@pytest.mark.parametrize("kind", ["mha", "gqa"])
@pytest.mark.parametrize("spec", SPECS)
def test_gradcheck(spec: str, kind: str) -> None:
    coupling = make(spec, kind, size=3)
    q, k = (t.requires_grad_() for t in tokens(coupling.head_shapes, batch=1, length=2))
    names = [name for name, _ in coupling.named_parameters()]

    def run(q: Tensor, k: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = torch.func.functional_call(
            coupling, dict(zip(names, values, strict=True)), (q, k)
        )
        return out

    assert torch.autograd.gradcheck(run, (q, k, *coupling.parameters()), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (q, k, *coupling.parameters()), fast_mode=True)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap, where PyTorch has no rule yet
@pytest.mark.parametrize("spec", SPECS)
def test_torch_func_transforms_match_reference(spec: str) -> None:
    """Per-example gradients (vmap of grad) and forward-mode derivatives (jvp)."""
    coupling = make(spec, "gqa")
    examples = tokens(coupling.head_shapes, batch=3)

    textbook = copy.deepcopy(coupling)
    textbook.forward = coupling.reference  # type: ignore[method-assign]

    def through(form: Coupling) -> tuple[object, object]:
        def loss(parameters: dict[str, Tensor], q: Tensor, k: Tensor) -> Tensor:
            new_q, new_k = torch.func.functional_call(form, parameters, (q[None], k[None]))
            return new_q.sin().sum() + new_k.cos().sum()

        each = torch.func.vmap(torch.func.grad(loss, argnums=(1, 2)), in_dims=(None, 0, 0))
        return each(dict(form.named_parameters()), *examples), torch.func.jvp(form, examples, examples)

    # seven affine steps amplify rounding
    torch.testing.assert_close(through(coupling), through(textbook), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("spec", SPECS)
def test_acts_per_token(spec: str) -> None:
    """Causality and caching of coupled keys depend on this."""
    coupling = make(spec, "gqa")
    q, k = tokens(coupling.head_shapes, length=6)
    whole_q, whole_k = coupling(q, k)
    for t in range(6):
        alone_q, alone_k = coupling(q[:, t : t + 1], k[:, t : t + 1])
        torch.testing.assert_close(alone_q, whole_q[:, t : t + 1], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(alone_k, whole_k[:, t : t + 1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("spec", SPECS)
def test_does_not_modify_inputs(spec: str) -> None:
    coupling = make(spec, "gqa")
    q, k = tokens(coupling.head_shapes)
    before = q.clone(), k.clone()
    coupling(q, k)
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("spec", SPECS)
def test_identity_at_init_iff_declared(spec: str, kind: str) -> None:
    coupling = make(spec, kind, perturbed=False)
    q, k = tokens(coupling.head_shapes)
    new_q, new_k = coupling(q, k)
    unchanged = torch.equal(new_q, q) and torch.equal(new_k, k)
    assert unchanged == coupling.identity_at_init


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("spec", SPECS)
def test_inverse_iff_declared(spec: str, kind: str) -> None:
    coupling = make(spec, kind)
    q, k = tokens(coupling.head_shapes)
    if not coupling.invertible:
        with raises_code("no-inverse"):
            coupling.inverse(q, k)
        return
    for first, second in ((coupling, coupling.inverse), (coupling.inverse, coupling)):
        mapped = first(q, k)
        new_q, new_k = second(*mapped)
        scale = max(1.0, *(t.abs().max().item() for t in mapped))
        torch.testing.assert_close(new_q, q, rtol=0, atol=5e-11 * scale)
        torch.testing.assert_close(new_k, k, rtol=0, atol=5e-11 * scale)


def jacobian(coupling: Coupling, size: int) -> Tensor:
    """Return the Jacobian of one head's (q, k) for one token."""

    def flat(z: Tensor) -> Tensor:
        q, k = coupling(z[:size].view(1, 1, 1, size), z[size:].view(1, 1, 1, size))
        return torch.cat((q.flatten(), k.flatten()))

    return torch.autograd.functional.jacobian(flat, torch.randn(2 * size, dtype=torch.float64))


@pytest.mark.parametrize("spec", SPECS)
def test_symplectic_iff_declared(spec: str) -> None:
    size = 4
    coupling = couplings.build(spec, HeadShapes(1, 1, 1, size, size, 1, size), DOUBLE)
    initialize(coupling, "fan_in", seed=0)
    scatter(coupling, 0.8)
    j, zero, one = jacobian(coupling, size), torch.zeros(size, size), torch.eye(size)
    omega = torch.cat((torch.cat((zero, one), 1), torch.cat((-one, zero), 1))).double()
    error = (j.T @ omega @ j - omega).abs().max().item()
    if coupling.symplectic:
        assert error <= 1e-12
    else:
        assert error > 1e-6


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("spec", SPECS)
def test_extra_parameters(spec: str, kind: str) -> None:
    coupling = make(spec, kind)
    assert sum(p.numel() for p in coupling.parameters()) == coupling.extra_parameters()


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("spec", SPECS)
def test_extra_flops(spec: str, kind: str) -> None:
    coupling = make(spec, kind, size=16)
    length = 1000  # so that matmuls between weights are negligible
    q, k = tokens(coupling.head_shapes, batch=1, length=length)
    counted = count_flops(lambda: coupling(q, k)) / length
    assert coupling.extra_flops() == pytest.approx(counted, rel=0.03)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("spec", SPECS)
def test_linear_drift_is_the_whole_map(spec: str, kind: str) -> None:
    coupling = make(spec, kind)
    drift = coupling.linear_drift()
    if drift is None:
        return
    q, k = tokens(coupling.head_shapes)
    new_q, new_k = coupling(q, k)
    expected = q + drift[:, None] * k.repeat_interleave(coupling.head_shapes.group_size, dim=2)
    torch.testing.assert_close(new_q, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(new_k, k)


def test_drift_is_the_linear_coupling() -> None:
    assert {spec.split(":")[0] for spec in SPECS if make(spec).linear_drift() is not None} == {"drift"}


@pytest.mark.parametrize("spec", SPECS)
def test_is_identity_only_if_outputs_are_unchanged(spec: str) -> None:
    for perturbed in (False, True):
        coupling = make(spec, "gqa", perturbed=perturbed)
        q, k = tokens(coupling.head_shapes)
        unchanged = all(torch.equal(a, b) for a, b in zip(coupling(q, k), (q, k), strict=True))
        assert coupling.is_identity() == unchanged


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("spec", SPECS)
def test_diagnostics_are_per_query_head(spec: str, kind: str) -> None:
    coupling = make(spec, kind)
    for values in coupling.diagnostics().values():
        assert values.shape == (coupling.head_shapes.n_q,)
        assert not values.requires_grad


@pytest.mark.parametrize("spec", SPECS)
def test_bf16_tolerance(spec: str) -> None:
    coupling = scatter(
        make(spec, "gqa", size=16, perturbed=False), 0.1
    )  # a large perturbation would amplify rounding
    q, k = tokens(coupling.head_shapes)
    exact = coupling(q, k)
    rough = copy.deepcopy(coupling).to(torch.bfloat16)(q.bfloat16(), k.bfloat16())
    for a, b in zip(rough, exact, strict=True):
        assert a.dtype == torch.bfloat16
        error = (a.double() - b).norm() / b.norm()
        assert error.item() < 0.05


@pytest.mark.parametrize("spec", SPECS)
def test_state_dict_round_trip(spec: str) -> None:
    saved, loaded = make(spec, "gqa"), make(spec, "gqa", perturbed=False)
    loaded.load_state_dict(saved.state_dict())
    q, k = tokens(saved.head_shapes)
    for a, b in zip(saved(q, k), loaded(q, k), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("spec", SPECS)
def test_builds_on_the_meta_device(spec: str) -> None:
    coupling = couplings.build(spec, heads("gqa"), {"device": "meta"})
    assert all(tensor.is_meta for tensor in (*coupling.parameters(), *coupling.buffers()))


@pytest.mark.parametrize("name", couplings.names())
def test_has_documentation(name: str) -> None:
    part = couplings.get(name)
    for text in (part.equation, part.citation, part.good_for, part.__doc__):
        assert text


def test_conservative_leapfrog_energy_error_is_second_order() -> None:
    """Ten times smaller steps over the same time: a hundred times less drift."""
    drifts = []
    for step in (0.1, 0.01):
        spec = f"leapfrog:conservative=true:steps={round(1 / step)}:step={step}:hidden=4"
        coupling = couplings.build(spec, heads("mha"), DOUBLE)
        initialize(coupling, "fan_in", seed=0)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            network = coupling.network
            network.weight.copy_(
                torch.rand(network.weight.shape, generator=generator, dtype=torch.float64) + 0.5
            )
        q, k = (torch.randn(4, 8, 4, 6, generator=generator, dtype=torch.float64) for _ in range(2))
        before, after = coupling.energy(q, k), coupling.energy(*coupling(q, k))
        drifts.append((after - before).abs().max().item())
    order = math.log10(drifts[0] / drifts[1])
    assert drifts[0] > 1e-8
    assert 1.9 < order < 2.1


def test_published_parameter_counts_at_60m() -> None:
    """65,536 in the networks, 0.111% of the model, and one step size per head."""
    layer = HeadShapes(8, 8, 8, 64, 64, 8, 64)
    assert 8 * couplings.build("euler:learn_step=false", layer).extra_parameters() == 65_536
    assert 8 * couplings.build("euler", layer).extra_parameters() == 65_536 + 64
    assert 8 * couplings.build("affine", layer).extra_parameters() == 196_608  # about 0.3% of 59.3M


@pytest.mark.parametrize("kind", ["mha", "gqa"])
def test_uncoupled_matches_parameter_count(kind: str) -> None:
    shape = heads(kind, 64)
    euler, control = (
        couplings.build(f"{name}:hidden=12", shape).extra_parameters() for name in ("euler", "uncoupled")
    )
    assert control == euler


@pytest.mark.parametrize("kind", ["mha", "gqa"])
def test_nonlinear_query_has_the_network_of_euler(kind: str) -> None:
    shape = heads(kind, 64)
    networks = [
        {name: p.shape for name, p in couplings.build(spec, shape).named_parameters()}
        for spec in ("euler:learn_step=false:bias=true", "nonlinear_query:bias=true")
    ]
    assert networks[0] == networks[1]
    assert couplings.build("nonlinear_query", shape).extra_parameters() == shape.n_q * 2 * 8 * 64
