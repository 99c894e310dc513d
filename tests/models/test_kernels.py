import pytest
import torch
import torch.nn.functional as F

from qkflow.models.kernels import RMSNorm, rms_norm, swiglu


def test_norm_equals_pytorchs():
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(x)
    ours, theirs = rms_norm(x, weight, 1e-6), F.rms_norm(x, (8,), weight, 1e-6)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-14)
    for mine, textbook in zip(
        torch.autograd.grad(ours, (x, weight), grad),
        torch.autograd.grad(theirs, (x, weight), grad),
        strict=True,
    ):
        torch.testing.assert_close(mine, textbook, rtol=1e-12, atol=1e-13)


def test_gate_equals_pytorchs():
    gate, up = (torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    grad = torch.randn_like(gate)
    ours, theirs = swiglu(gate, up), F.silu(gate) * up
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-14)
    for mine, textbook in zip(
        torch.autograd.grad(ours, (gate, up), grad),
        torch.autograd.grad(theirs, (gate, up), grad),
        strict=True,
    ):
        torch.testing.assert_close(mine, textbook, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_pass_through_views_and_half_precision(dtype):
    norm = RMSNorm(8, eps=1e-6).to(dtype)
    x = torch.randn(5, 3, 8, dtype=dtype, requires_grad=True)
    out = norm(x.transpose(0, 1))
    out.transpose(0, 1).sum().backward()
    assert out.dtype == dtype
    assert torch.isfinite(x.grad).all()
