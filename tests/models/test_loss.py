"""The chunked linear cross-entropy against its reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qkflow.models import Decoder, preset
from qkflow.models.cost import flops_per_token
from qkflow.models.loss import linear_cross_entropy, linear_cross_entropy_reference


def make_inputs(
    dtype: torch.dtype = torch.float64, n_tokens: int = 37, dim: int = 6, vocab_size: int = 11
) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, output weight and targets."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(rows, dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for rows in (n_tokens, vocab_size)
    )
    return hidden, weight, torch.randint(vocab_size, (n_tokens,), generator=generator)


def loss_and_grads(
    loss_fn: Callable[..., Tensor], hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any
) -> tuple[Tensor, ...]:
    loss = loss_fn(hidden, weight, targets, **options)
    return loss, *torch.autograd.grad(3 * loss, (hidden, weight))


@pytest.mark.parametrize("chunk_size", [1, 8, 37, 1000])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("n_ignored", [0, 9])
@pytest.mark.parametrize("softcap", [None, 0.5, 15.0])
def test_matches_reference_in_float64(
    chunk_size: int, reduction: str, n_ignored: int, softcap: float | None
) -> None:
    hidden, weight, targets = make_inputs()
    targets[:n_ignored] = -100
    options: dict[str, Any] = {"reduction": reduction, "softcap": softcap}
    ours = loss_and_grads(linear_cross_entropy, hidden, weight, targets, chunk_size=chunk_size, **options)
    textbook = loss_and_grads(linear_cross_entropy_reference, hidden, weight, targets, **options)
    for a, b in zip(ours, textbook, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_large_logits_are_stable() -> None:
    hidden, weight, targets = make_inputs()
    hidden = (hidden * 1000).detach().requires_grad_()
    for a, b in zip(
        loss_and_grads(linear_cross_entropy, hidden, weight, targets, chunk_size=5),
        loss_and_grads(linear_cross_entropy_reference, hidden, weight, targets),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_batched_shape_and_ignored_token_with_infinite_loss() -> None:
    hidden, weight, targets = make_inputs(n_tokens=36)
    with torch.no_grad():
        hidden[3] = float("inf")
    targets[3] = -100
    loss = linear_cross_entropy(hidden.view(4, 9, 6), weight, targets.view(4, 9))
    keep = [i for i in range(36) if i != 3]
    torch.testing.assert_close(loss, linear_cross_entropy_reference(hidden[keep], weight, targets[keep]))


def test_softcap_gradient_by_finite_differences() -> None:
    hidden, weight, targets = make_inputs(n_tokens=5)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, targets, softcap=1.5, chunk_size=2), (hidden, weight)
    )


def test_large_logits_stay_below_the_softcap() -> None:
    hidden, weight, targets = make_inputs()
    hidden = (1e6 * hidden).detach().requires_grad_()
    loss, *gradients = loss_and_grads(linear_cross_entropy, hidden, weight, targets, softcap=3.0)
    assert loss.item() <= 6.0 + math.log(11)
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_input_gets_no_gradient(frozen: int) -> None:
    hidden, weight, targets = make_inputs()
    parts = [hidden, weight]
    parts[frozen] = parts[frozen].detach()
    linear_cross_entropy(parts[0], parts[1], targets).backward()
    assert parts[frozen].grad is None
    assert parts[1 - frozen].grad is not None


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_bf16_autocast_tolerance(softcap: float | None) -> None:
    hidden, weight, targets = make_inputs(torch.float32, n_tokens=200, dim=32, vocab_size=50)
    exact = loss_and_grads(linear_cross_entropy_reference, hidden, weight, targets, softcap=softcap)
    with torch.autocast("cpu", torch.bfloat16):
        rough = loss_and_grads(linear_cross_entropy, hidden, weight, targets, chunk_size=64, softcap=softcap)
    assert rough[0].dtype == torch.float32
    for a, b in zip(rough, exact, strict=True):
        assert (a - b).norm() <= 0.02 * b.norm()


def test_no_gradient_work_under_no_grad() -> None:
    model = Decoder(preset("tiny", vocab_size=64, n_layers=1), seed=0)
    assert flops_per_token(model, 16) == 3 * flops_per_token(model, 16, training=False)


def test_all_targets_ignored_gives_zero_loss_and_gradient() -> None:
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.full((4,), -100))
    loss.backward()
    assert loss.item() == 0
    for tensor in (hidden, weight):
        assert tensor.grad is not None
        assert not tensor.grad.any()


@pytest.mark.parametrize("target", [-1, 16])
def test_target_outside_the_vocabulary(target: int) -> None:
    with pytest.raises(RuntimeError, match="out of bounds"):  # raised by PyTorch
        linear_cross_entropy(torch.randn(2, 8), torch.randn(16, 8), torch.tensor([3, target]))
