"""The blocked difference of softmaxes."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from qkflow.attention import Attention
from qkflow.attention.masks import Mask
from qkflow.attention.scorings import paired


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("length", [128, 150])
def test_forward_and_backward_match_reference(n_heads: int, n_kv_heads: int, length: int) -> None:
    layer = Attention(
        24, n_heads, n_kv_heads=n_kv_heads, head_dim=8, scoring="differential_v2", seed=0
    ).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    x = torch.randn(2, length, 24, dtype=torch.float64, requires_grad=True)
    q, k, v = layer.project_qkv(x)
    assert paired.supports(q, k, v, Mask(causal=True), 0.0)
    signal = torch.randn(2, length, 24, dtype=torch.float64)
    inputs = [x, *layer.parameters()]
    outs = layer(x), layer.reference(x)[0]
    torch.testing.assert_close(*outs, rtol=1e-12, atol=1e-12)
    for fast, textbook in zip(*(torch.autograd.grad(out, inputs, signal) for out in outs), strict=True):
        torch.testing.assert_close(fast, textbook, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("coupling", ["euler:bias=true", "uncoupled:bias=true"])
def test_autocast_gradients_are_finite(coupling: str) -> None:
    layer = Attention(16, 2, scoring="differential_v2", coupling=coupling, seed=0)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(torch.randn(1, 128, 16, requires_grad=True))
    out.float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_causal_by_perturbation() -> None:
    layer = Attention(16, 2, scoring="differential_v2", seed=0)
    x = torch.randn(1, 200, 16)
    changed = x.clone()
    changed[:, 130] += 1
    same = (layer(x) == layer(changed)).all(dim=-1)[0]
    assert same[:130].all()
    assert not same[130:].any()


def make_inputs() -> tuple[torch.Tensor, ...]:
    shapes = ((1, 5, 4, 2), (1, 5, 1, 2), (1, 5, 1, 3), (1, 5, 2))
    return tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)


def test_gradcheck_and_double_backward() -> None:
    def difference(*x: torch.Tensor) -> torch.Tensor:
        return paired.softmax_difference(*x, scale=0.5)

    assert torch.autograd.gradcheck(difference, make_inputs())
    assert torch.autograd.gradgradcheck(difference, make_inputs())


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap of SDPA
def test_vmap_and_jvp_match_plain_calls() -> None:
    layer = Attention(16, 2, scoring="differential_v2", seed=0).double()
    x = torch.randn(2, 130, 16, dtype=torch.float64)
    per_example = torch.func.vmap(lambda one: layer(one[None])[0])(x)
    torch.testing.assert_close(per_example, layer(x))
    with sdpa_kernel(SDPBackend.MATH):  # the flash kernel has no forward-mode derivative
        _, tangent = torch.func.jvp(layer, (x,), (torch.ones_like(x),))
    step = 1e-6
    slope = (layer(x + step) - layer(x - step)) / (2 * step)
    torch.testing.assert_close(tangent, slope, rtol=1e-4, atol=1e-6)
