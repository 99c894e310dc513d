"""Training in count space against a token-level module, the stop rule, and the configs of the figure."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from input_errors import raises_code
from qkflow.papers.faster_qk.batched_circuits import CollapsedCircuit, FactorizedCircuit
from qkflow.papers.faster_qk.controlled_task import (
    FIRST_LABEL_ID,
    FIRST_QUERY_ID,
    N_COMMON,
    BatchStream,
    count_tokens,
)
from qkflow.papers.faster_qk.reduced_flow import KINDS
from qkflow.papers.faster_qk.synthetic import (
    EPOCH_STEPS,
    EPOCHS_PER_CHECK,
    FIGURE_CONFIGS,
    SyntheticConfig,
    build_circuits,
    gradients,
    synthetic_config,
    train_synthetic,
)


class TokenAttention(nn.Module):
    """The model over tokens instead of counts, with full matrices and autograd."""

    key: nn.Parameter
    query: nn.Parameter
    qk: nn.Parameter
    value: nn.Parameter
    output: nn.Parameter
    ov: nn.Parameter

    def __init__(self, kind: str, seed: int, init: str) -> None:
        super().__init__()
        self.kind = kind
        generator = torch.Generator().manual_seed(seed)
        names = ["key", "query"] if kind.startswith("FA") else ["qk"]
        names += ["value", "output"] if kind.endswith("FO") else ["ov"]
        for name in names:
            uniform = torch.empty(50, 50).uniform_(-(50**-0.5), 50**-0.5, generator=generator)
            matrix = uniform.double() if init == "uniform" else 1e-6 * torch.eye(50).double()
            setattr(self, name, nn.Parameter(matrix))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = nn.functional.one_hot(tokens, 50).double()
        last = x[:, -1]
        if self.kind.startswith("FA"):
            scores = torch.einsum("bd,btd->bt", last @ self.query.T, x @ self.key.T)
        else:
            scores = torch.einsum("bd,de,bte->bt", last, self.qk, x)
        attention = torch.softmax(scores / math.sqrt(50), -1)
        values = x @ self.value.T @ self.output.T if self.kind.endswith("FO") else x @ self.ov.T
        return torch.einsum("bt,btd->bd", attention, values)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("init", ["identity", "uniform"])
def test_count_space_matches_token_module(kind: str, init: str) -> None:
    """Five steps with an increasing learning rate: gradients and weights agree to rounding in float64."""
    steps, growth = 5, 3.0
    config = SyntheticConfig(
        "test", kind, 0.7, 0.3, 20, steps, growth, qk_init=init, ov_init=init, batch_size=16
    )
    plain = TokenAttention(kind, seed=7, init=init)
    names = dict(plain.named_parameters())
    rates = {name: 0.7 if name in ("qk", "key", "query") else 0.3 for name in names}
    qk, ov = build_circuits([config], [7], torch.float64)
    tokens, classes = BatchStream(7, config.seq_len, config.batch_size).sample_sequences(steps)
    for step in range(steps):
        inputs, labels = torch.from_numpy(tokens[step]), torch.from_numpy(classes[step]) + FIRST_LABEL_ID
        loss = nn.functional.cross_entropy(plain(inputs), labels)
        by = dict(zip(names, torch.autograd.grad(loss, names.values()), strict=True))
        counts = torch.from_numpy(count_tokens(tokens[step]))[None].double()
        one_hot = nn.functional.one_hot(torch.from_numpy(classes[step]), 4)[None].double()
        truth, score_grad, ov_grad = gradients(counts, one_hot, qk.value() / 50**0.5, ov.value())
        assert abs(truth.log().mean().item() + loss.item()) <= 1e-12

        queries = slice(FIRST_QUERY_ID, FIRST_QUERY_ID + 4)
        if "qk" in by:
            assert (score_grad[0] / 50**0.5 / 16 - by["qk"][queries]).abs().max() <= 1e-12
            other_rows = torch.ones(50, dtype=torch.bool)
            other_rows[queries] = False
            assert not by["qk"][other_rows].any()  # rows of other tokens have no gradient
        if "ov" in by:
            assert (ov_grad[0] / 16 - by["ov"]).abs().max() <= 1e-12

        factor = 1 + (growth - 1) * step / steps
        qk.sgd_step(score_grad * (0.7 * factor / 50**0.5 / 16))
        ov.sgd_step(ov_grad * (0.3 / 16))
        with torch.no_grad():
            for name, weight in names.items():
                weight -= rates[name] * (factor if rates[name] == 0.7 else 1.0) * by[name]
    if isinstance(qk, FactorizedCircuit):
        assert (qk.left[0] - names["query"][:, queries].T).abs().max() <= 1e-12
        assert (qk.right[0] - names["key"]).abs().max() <= 1e-12
    else:
        assert (qk.matrix[0] - names["qk"][queries]).abs().max() <= 1e-12
    if isinstance(ov, CollapsedCircuit):
        assert (ov.matrix[0] - names["ov"]).abs().max() <= 1e-12
    else:
        assert (ov.left[0] - names["output"]).abs().max() <= 1e-12
        assert (ov.right[0] - names["value"]).abs().max() <= 1e-12


def test_train_matches_token_module_for_every_run() -> None:
    """Two configs × two seeds in one computation end where the token-level module ends for each of them."""
    configs = [
        SyntheticConfig(
            "slow", "FACO", 0.5, 0.5, 12, 300, 1.0, qk_init="uniform", ov_init="uniform", batch_size=8
        ),
        SyntheticConfig(
            "fast", "FACO", 2.0, 0.5, 12, 300, 2.0, qk_init="uniform", ov_init="uniform", batch_size=8
        ),
    ]
    results = train_synthetic(configs, [3, 4], dtype=torch.float64)
    assert [(result.config.name, result.seed) for result in results] == [
        ("slow", 3),
        ("slow", 4),
        ("fast", 3),
        ("fast", 4),
    ]
    for result in results:
        config, seed = result.config, result.seed
        plain = TokenAttention("FACO", seed, "uniform")
        stream = BatchStream(seed, config.seq_len, config.batch_size)
        chunks = [stream.sample_sequences(250), stream.sample_sequences(50)]
        tokens, classes = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
        for step in range(config.steps):
            rate = config.qk_lr * (1 + (config.growth - 1) * step / config.steps)
            loss = nn.functional.cross_entropy(
                plain(torch.from_numpy(tokens[step])), torch.from_numpy(classes[step]) + FIRST_LABEL_ID
            )
            by = torch.autograd.grad(loss, [plain.key, plain.query, plain.ov])
            with torch.no_grad():
                plain.key -= rate * by[0]
                plain.query -= rate * by[1]
                plain.ov -= config.ov_lr * by[2]
        held_out, held_out_classes = BatchStream(seed + 2**32, config.seq_len, 20_000).sample_sequences(1)
        with torch.no_grad():
            logits = plain(torch.from_numpy(held_out[0]))
        loss = nn.functional.cross_entropy(logits, torch.from_numpy(held_out_classes[0]) + FIRST_LABEL_ID)
        assert result.loss == pytest.approx(loss.item(), abs=1e-10)


def test_batch_stream_distribution() -> None:
    tokens, classes = BatchStream(0, 64, 20_000).sample_sequences(1)
    tokens, classes = tokens[0], classes[0]
    assert tokens.shape == (20_000, 63)
    assert (tokens[:, -1] == FIRST_QUERY_ID + classes).all()
    context, counts = tokens[:, :-1], count_tokens(tokens)
    assert (counts.sum(-1) == 63).all()
    own = (context < N_COMMON) | (context // N_COMMON == classes[:, None] + 1)
    assert own.all()
    weights = np.concatenate([np.ones(10), np.arange(1, 11) / 10])
    first = context[classes == 0]
    shares = np.bincount(first.ravel(), minlength=20) / first.size
    assert np.abs(shares - weights / weights.sum()).max() < 2e-3
    assert np.bincount(classes).tolist() == pytest.approx([5000] * 4, rel=0.05)
    assert (tokens >= N_COMMON).mean() == pytest.approx(0.349, abs=1e-3)  # distinct attention when uniform


def test_balanced_batches() -> None:
    _, classes = BatchStream(0, 10, 32, balanced=True).sample_sequences(3)
    assert all(np.bincount(row).tolist() == [8] * 4 for row in classes)


def test_stop_rule_checks_every_tenth_epoch_per_run() -> None:
    common: dict[str, Any] = {"kind": "CACO", "qk_lr": 5.0, "ov_lr": 5.0, "seq_len": 16, "ov_init": "uniform"}
    configs = [
        SyntheticConfig("stops", steps=6_000, stop_loss=0.5, **common),
        SyntheticConfig("runs to the end", steps=3_000, **common),
    ]
    progress: list[int] = []
    first, second = train_synthetic(configs, [0], on_progress=progress.append)
    assert first.steps == EPOCH_STEPS * EPOCHS_PER_CHECK == 2_500  # the loss is low enough long before
    assert second.steps == 3_000
    assert sum(progress) == 6_000 + 3_000
    alone = train_synthetic(configs[1:], [0])[0]  # a run that stops does not change the others
    assert alone.loss == pytest.approx(second.loss, rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "seq_len", "steps", "stop_loss"),
    [
        ("CACO", 128, 200_000, 0.0),
        ("CACO", 64, 500_000, 1e-3),
        ("CACO", 256, 200_000, 0.0),
        ("CAFO", 128, 1_000_000, 1e-3),
        ("FACO", 64, 625_000, 1e-3),
    ],
)
def test_default_steps_follow_kind_and_length(kind: str, seq_len: int, steps: int, stop_loss: float) -> None:
    config = synthetic_config(kind, seq_len=seq_len)
    assert (config.steps, config.stop_loss, config.seq_len) == (steps, stop_loss, seq_len)
    assert (config.qk_lr, config.growth) == (0.01, 1.0)


def test_synthetic_config_reuses_the_configs_of_the_figure() -> None:
    assert synthetic_config("CACO", 0.05, 0.01, 128) is FIGURE_CONFIGS[4]
    assert synthetic_config("CACO", 0.05, 0.01, 128, steps=10).published is None
    assert synthetic_config("CACO", 0.05, 0.01, 64).published is None
    assert synthetic_config("FAFO", growth=40).steps == 200_000


def test_distinct_attention_grows_with_qk_lr() -> None:
    common: dict[str, Any] = {"kind": "CACO", "ov_lr": 0.3, "seq_len": 128, "steps": 1_500}
    slow, fast = train_synthetic(
        [SyntheticConfig("r=1", qk_lr=0.3, **common), SyntheticConfig("r=20", qk_lr=6.0, **common)], [0]
    )
    assert slow.heatmap.shape == (5, 5)
    assert slow.attention_histogram.sum() == pytest.approx(100)
    assert fast.mean_distinct_attention > slow.mean_distinct_attention + 0.1


def test_short_sequences_attend_to_the_query() -> None:
    """The query determines the class; the shorter the sequence, the larger its initial share."""
    (fast,) = train_synthetic([SyntheticConfig("r=20", "CACO", 6.0, 0.3, 32, 1_500)], [0])
    assert fast.mean_query_attention > 0.8
    assert fast.mean_distinct_attention < 0.2


def test_divergence_raises() -> None:
    with raises_code("diverged"):
        train_synthetic([SyntheticConfig("diverges", "CACO", 1e30, 1e30, 16, 500)], [0])


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"kind": "FAFA"}, "unknown-setting"),
        ({"qk_lr": 0.0}, "option-not-positive"),
        ({"seq_len": 2}, "sequence-too-short"),
        ({"batch_size": 0}, "invalid-batch-size"),
        ({"ov_init": "ones"}, "unknown-init"),
        ({"steps": 0}, "option-not-positive"),
    ],
)
def test_invalid_config_raises(options: dict[str, Any], code: str) -> None:
    with raises_code(code):
        SyntheticConfig(**{"name": "x", "kind": "CACO"} | options)


def test_mixed_shapes_raise() -> None:
    with raises_code("mixed-config-shapes"):
        train_synthetic([FIGURE_CONFIGS[0], FIGURE_CONFIGS[1]], [0])
