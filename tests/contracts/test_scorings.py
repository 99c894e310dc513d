"""Contract of every registered scoring."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parts import scatter, scoring_specs
from qkflow.attention import Attention, scorings

SPECS = scoring_specs()


def make(spec: str, **options: Any) -> Attention:
    options = {"n_kv_heads": 2, "dtype": torch.float64, "init": "fan_in", "layer_idx": 2, **options}
    layer = Attention(16, 4, scoring=spec, **options)
    scatter(layer, 0.2)
    return layer


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("spec", SPECS)
def test_forward_and_backward_match_reference(spec: str, causal: bool) -> None:
    layer = make(spec, causal=causal)
    x = torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True)
    inputs, signal = [x, *layer.parameters()], torch.randn(2, 7, 16, dtype=torch.float64)
    fast, slow = layer(x), layer.reference(x)[0]
    assert (fast - slow).abs().max().item() <= 1e-12
    grads = (torch.autograd.grad(out, inputs, signal) for out in (fast, slow))
    for a, b in zip(*grads, strict=True):
        assert ((a - b).abs().max() / b.abs().max().clamp_min(1.0)).item() <= 1e-12


@pytest.mark.parametrize("spec", SPECS)
def test_weights_are_causal(spec: str) -> None:
    layer = make(spec)
    weights = layer.reference(torch.randn(2, 9, 16, dtype=torch.float64))[1]
    assert weights.shape == (2, layer.head_shapes.n_out, 9, 9)
    assert weights.triu(1).abs().max().item() == 0
    assert weights.tril().abs().min(dim=1).values.max().item() > 0


@pytest.mark.parametrize("spec", SPECS)
def test_extra_parameters(spec: str) -> None:
    layer = make(spec)
    assert sum(p.numel() for p in layer.scoring.parameters()) == layer.scoring.extra_parameters()


@pytest.mark.parametrize("spec", SPECS)
def test_has_documentation(spec: str) -> None:
    part = scorings.get(spec)
    for text in (part.equation, part.citation, part.good_for, part.__doc__):
        assert text


def test_softmax_weights_sum_to_one() -> None:
    weights = make("softmax").reference(torch.randn(2, 9, 16, dtype=torch.float64))[1]
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 9, dtype=torch.float64))


def test_differential_follows_the_published_equations() -> None:
    """Head by head, as in the paper."""
    layer = make("differential", n_kv_heads=4, rope=False)
    scoring = layer.scoring
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    q = layer.qk.q(x).view(6, 4, 4)
    k = layer.qk.k(x).view(6, 4, 4)
    v = layer.ov.v(x).view(6, 2, 8)
    q1, k1, q2, k2 = scoring.vectors
    lambda_init = 0.8 - 0.6 * torch.exp(torch.tensor(-0.3 * 2, dtype=torch.float64))
    strength = torch.exp((q1 * k1).sum()) - torch.exp((q2 * k2).sum()) + lambda_init
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
    heads = []
    for i in range(2):
        first, second = (
            (q[:, s] @ k[:, s].T / 2.0).masked_fill(mask, float("-inf")).softmax(-1)
            for s in (2 * i, 2 * i + 1)
        )
        out = (first - strength * second) @ v[:, i]
        out = out / (out.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scoring.norm
        heads.append(out * (1 - lambda_init))
    expected = layer.ov.o(torch.cat(heads, -1))
    torch.testing.assert_close(layer(x)[0], expected, rtol=0, atol=1e-12)


def test_differential_v2_follows_its_equations() -> None:
    layer = make("differential_v2", n_kv_heads=4, rope=False)
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    q = layer.qk.q(x).view(6, 8, 4)
    k = layer.qk.k(x).view(6, 4, 4)
    v = layer.ov.v(x).view(6, 4, 4)
    strength = torch.sigmoid(layer.scoring.strength(x))[0]
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
    heads = []
    for i in range(4):
        first, second = (
            (q[:, j] @ k[:, i].T / 2.0).masked_fill(mask, float("-inf")).softmax(-1) @ v[:, i]
            for j in (2 * i, 2 * i + 1)
        )
        heads.append(first - strength[:, i : i + 1] * second)
    torch.testing.assert_close(layer(x)[0], layer.ov.o(torch.cat(heads, -1)), rtol=0, atol=1e-12)
