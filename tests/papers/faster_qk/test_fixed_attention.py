"""The fixed-attention experiment against plain linear layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qkflow.errors import InputError
from qkflow.papers.faster_qk import fixed_attention
from qkflow.papers.faster_qk.controlled_task import FIRST_LABEL_ID, N_COMMON, BatchStream


def plain_attention(tokens: torch.Tensor, alpha: float) -> torch.Tensor:
    """α spread over the distinct tokens of each sequence, the rest over its others: (B, T)."""
    distinct = tokens >= N_COMMON
    number = distinct.sum(-1, keepdim=True).double()
    return torch.where(distinct, alpha / number, (1 - alpha) / (tokens.shape[-1] - number))


@pytest.mark.parametrize("kind", ["collapsed", "factorised"])
def test_training_equals_plain_linear_layers(kind: str) -> None:
    """Forty float64 steps of nn.Linear layers, biases and all, token by token, from torch's own start."""
    steps, lr, batch, length, seed, alphas = 40, 0.5, 16, 24, 11, (0.3, 1.0)
    found = fixed_attention.train_fixed_attention(
        kind, [seed], steps, lr, batch, length, alphas, dtype=torch.float64
    )
    fresh, kinds = BatchStream(2**32, length, 40_000, balanced=True).sample_sequences(1)
    for alpha, ours in zip(alphas, found, strict=True):
        torch.manual_seed(seed)
        layers = [nn.Linear(50, 50)] if kind == "collapsed" else [nn.Linear(50, 50), nn.Linear(50, 50)]
        model = nn.Sequential(*layers).double()
        optimizer = torch.optim.SGD(model.parameters(), lr)

        def loss_of(
            tokens: torch.Tensor, labels: torch.Tensor, share: float, model: nn.Module
        ) -> torch.Tensor:
            weights = plain_attention(tokens, share)
            values = torch.einsum("bt,btd->bd", weights, nn.functional.one_hot(tokens, 50).double())
            return nn.functional.cross_entropy(model(values), labels)

        tokens, classes = BatchStream(seed, length, batch, balanced=True).sample_sequences(steps)
        for step in range(steps):
            optimizer.zero_grad()
            labels = torch.from_numpy(classes[step]) + FIRST_LABEL_ID
            loss_of(torch.from_numpy(tokens[step]), labels, alpha, model).backward()
            optimizer.step()
        with torch.no_grad():
            labels = torch.from_numpy(kinds[0]) + FIRST_LABEL_ID
            inputs = torch.from_numpy(fresh[0])
            final = loss_of(inputs, labels, alpha, model)
            assert ours.loss == pytest.approx(final.item(), abs=1e-12)
            if alpha < 1:
                sharper = loss_of(inputs, labels, alpha + fixed_attention.DELTA, model)
                gain = (final - sharper).item() / fixed_attention.DELTA
                assert ours.gain == pytest.approx(gain, abs=1e-9)
            else:
                assert ours.gain is None
        assert ours.history[-1] == (steps, ours.loss)


def test_sharper_attention_learns_faster() -> None:
    losses = [
        each.loss for each in fixed_attention.train_fixed_attention("collapsed", [0], steps=500, lr=1.0)
    ]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"kind": "flat"}, "unknown circuit"),
        ({"alphas": (0.5, 1.5)}, "between 0 and 1"),
        ({"lr": 0.0}, "must be positive"),
        ({"batch_size": 30}, "multiple of 4"),
    ],
)
def test_bad_input_is_refused(wrong: dict, said: str) -> None:
    with pytest.raises(InputError, match=said):
        fixed_attention.train_fixed_attention(**{"kind": "collapsed", "seeds": [0], "steps": 10} | wrong)
