"""Operations with gradients by hand: every way of looking into them shows the same function."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qkflow.attention.rope import RotaryEmbedding, apply_rope
from qkflow.attention.scorings.paired import softmax_difference
from qkflow.models.kernels import rms_norm, swiglu

POSITIONS = torch.arange(3)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "rotate": (
        lambda x: apply_rope(x, RotaryEmbedding().rotation(POSITIONS, 4, torch.float64)),
        (normal(2, 3, 2, 4),),
    ),
    "rms_norm": (lambda x, weight: rms_norm(x, weight, 1e-5), (normal(3, 4), normal(4))),
    "swiglu": (swiglu, (normal(3, 4), normal(3, 4))),
    "difference": (
        lambda q, k, v, strength: softmax_difference(q, k, v, strength, 0.5),
        (normal(1, 5, 4, 2), normal(1, 5, 1, 2), normal(1, 5, 1, 3), normal(1, 5, 2)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_second_derivatives(name: str) -> None:
    function, given = CASES[name]
    inputs = tuple(x.clone().requires_grad_() for x in given)
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("name", CASES)
def test_forward_mode_is_the_slope(name: str) -> None:
    function, given = CASES[name]
    directions = tuple(torch.randn_like(x) for x in given)
    step = 1e-6

    def moved(by: float) -> Tensor:
        return function(*(x + by * d for x, d in zip(given, directions, strict=True)))

    slope = (moved(step) - moved(-step)) / (2 * step)
    torch.testing.assert_close(torch.func.jvp(function, given, directions)[1], slope, rtol=1e-6, atol=1e-7)
    with torch.autograd.forward_ad.dual_level():
        duals = (torch.autograd.forward_ad.make_dual(x, d) for x, d in zip(given, directions, strict=True))
        tangent = torch.autograd.forward_ad.unpack_dual(function(*duals)).tangent
    torch.testing.assert_close(tangent, slope, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", CASES)
def test_one_of_many_is_as_if_alone(name: str) -> None:
    function, given = CASES[name]
    many = tuple(torch.stack((x, 2 * x)) for x in given)
    one_by_one = torch.stack([function(*(x[i] for x in many)) for i in range(2)])
    torch.testing.assert_close(torch.func.vmap(function)(*many), one_by_one)
