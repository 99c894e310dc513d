"""The blocked difference of softmaxes against the textbook."""

import pytest
import torch

from qkflow.attention import Attention
from qkflow.attention.masks import Mask
from qkflow.attention.scorings import paired


@pytest.mark.parametrize(("heads", "n_kv_heads"), [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("length", [128, 150])
def test_equals_the_textbook_with_its_gradients(heads: int, kv_heads: int, length: int) -> None:
    layer = Attention(24, heads, n_kv_heads=kv_heads, head_dim=8, scoring="differential_v2", seed=0).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    x = torch.randn(2, length, 24, dtype=torch.float64, requires_grad=True)
    q, k, v = layer.project_qkv(x, None, None, None, None, None)
    assert paired.supports(q, k, v, Mask(causal=True), 0.0)
    signal = torch.randn(2, length, 24, dtype=torch.float64)
    inputs = [x, *layer.parameters()]
    outs = layer(x), layer.reference(x)[0]
    torch.testing.assert_close(*outs, rtol=1e-12, atol=1e-12)
    for fast, textbook in zip(*(torch.autograd.grad(out, inputs, signal) for out in outs), strict=True):
        torch.testing.assert_close(fast, textbook, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("coupling", ["euler:bias=true", "uncoupled:bias=true"])
def test_trains_in_mixed_precision(coupling: str) -> None:
    layer = Attention(16, 2, scoring="differential_v2", coupling=coupling, seed=0)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(torch.randn(1, 128, 16, requires_grad=True))
    out.float().sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in layer.parameters())


def test_sees_no_future() -> None:
    layer = Attention(16, 2, scoring="differential_v2", seed=0)
    x = torch.randn(1, 200, 16)
    changed = x.clone()
    changed[:, 130] += 1
    same = (layer(x) == layer(changed)).all(dim=-1)[0]
    assert same[:130].all()
    assert not same[130:].any()
