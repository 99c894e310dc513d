"""Training under fixed attention against nn.Linear layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from input_errors import raises_code
from qkflow.papers.faster_qk import fixed_attention
from qkflow.papers.faster_qk.controlled_task import FIRST_LABEL_ID, N_COMMON, BatchStream


def attention_weights(tokens: torch.Tensor, alpha: float) -> torch.Tensor:
    """Weights (B, T): α spread over the distinct tokens of each sequence, 1 − α over the others."""
    distinct = tokens >= N_COMMON
    n_distinct = distinct.sum(-1, keepdim=True).double()
    return torch.where(distinct, alpha / n_distinct, (1 - alpha) / (tokens.shape[-1] - n_distinct))


@pytest.mark.parametrize("kind", ["collapsed", "factorized"])
def test_training_matches_linear_layers(kind: str) -> None:
    """Forty float64 SGD steps of nn.Linear layers with biases, token by token, from PyTorch's init."""
    steps, lr, batch_size, seq_len, seed, alphas = 40, 0.5, 16, 24, 11, (0.3, 1.0)
    results = fixed_attention.train_fixed_attention(
        kind, [seed], steps, lr, batch_size, seq_len, alphas, dtype=torch.float64
    )
    held_out, held_out_classes = BatchStream(2**32, seq_len, 40_000, balanced=True).sample_sequences(1)
    for alpha, result in zip(alphas, results, strict=True):
        torch.manual_seed(seed)
        layers = [nn.Linear(50, 50)] if kind == "collapsed" else [nn.Linear(50, 50), nn.Linear(50, 50)]
        model = nn.Sequential(*layers).double()
        optimizer = torch.optim.SGD(model.parameters(), lr)

        def loss_of(
            tokens: torch.Tensor, labels: torch.Tensor, share: float, model: nn.Module
        ) -> torch.Tensor:
            weights = attention_weights(tokens, share)
            values = torch.einsum("bt,btd->bd", weights, nn.functional.one_hot(tokens, 50).double())
            return nn.functional.cross_entropy(model(values), labels)

        tokens, classes = BatchStream(seed, seq_len, batch_size, balanced=True).sample_sequences(steps)
        for step in range(steps):
            optimizer.zero_grad()
            labels = torch.from_numpy(classes[step]) + FIRST_LABEL_ID
            loss_of(torch.from_numpy(tokens[step]), labels, alpha, model).backward()
            optimizer.step()
        with torch.no_grad():
            labels = torch.from_numpy(held_out_classes[0]) + FIRST_LABEL_ID
            inputs = torch.from_numpy(held_out[0])
            final = loss_of(inputs, labels, alpha, model)
            assert result.loss == pytest.approx(final.item(), abs=1e-12)
            if alpha < 1:
                sharper = loss_of(inputs, labels, alpha + fixed_attention.DELTA, model)
                gain = (final - sharper).item() / fixed_attention.DELTA
                assert result.gain == pytest.approx(gain, abs=1e-9)
            else:
                assert result.gain is None
        assert result.history[-1] == (steps, result.loss)


def test_final_loss_falls_with_alpha() -> None:
    losses = [
        each.loss for each in fixed_attention.train_fixed_attention("collapsed", [0], steps=500, lr=1.0)
    ]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"kind": "flat"}, "unknown-circuit"),
        ({"alphas": (0.5, 1.5)}, "alpha-out-of-range"),
        ({"lr": 0.0}, "option-not-positive"),
        ({"batch_size": 30}, "invalid-batch-size"),
    ],
)
def test_invalid_options_raise(options: dict[str, Any], code: str) -> None:
    with raises_code(code):
        fixed_attention.train_fixed_attention(**{"kind": "collapsed", "seeds": [0], "steps": 10} | options)
