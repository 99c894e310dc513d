"""Count-space training against a plain attention module over tokens, and what it learns."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from qkflow.errors import InputError
from qkflow.papers.faster_qk.batched_circuits import CollapsedCircuit, FactorisedCircuit
from qkflow.papers.faster_qk.controlled_task import (
    FIRST_LABEL_ID,
    FIRST_QUERY_ID,
    N_COMMON,
    BatchStream,
    count_tokens,
)
from qkflow.papers.faster_qk.reduced_flow import KINDS
from qkflow.papers.faster_qk.synthetic import (
    FIGURE_CONFIGS,
    SyntheticConfig,
    build_circuits,
    gradients,
    train_synthetic,
)


class PlainAttention(nn.Module):
    """The textbook model: every token attended on its own, full matrices, gradients by autograd."""

    def __init__(self, kind: str, seed: int, start: str) -> None:
        super().__init__()
        self.kind = kind
        generator = torch.Generator().manual_seed(seed)
        names = ["key", "query"] if kind.startswith("FA") else ["qk"]
        names += ["value", "output"] if kind.endswith("FO") else ["ov"]
        for name in names:
            drawn = torch.empty(50, 50).uniform_(-(50**-0.5), 50**-0.5, generator=generator)
            matrix = drawn.double() if start == "uniform" else 1e-6 * torch.eye(50).double()
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
@pytest.mark.parametrize("start", ["identity", "uniform"])
def test_count_space_trains_exactly_as_the_plain_module(kind: str, start: str) -> None:
    """Five steps of increasing learning rates: gradients, and so weights, agree to rounding in float64."""
    steps, growth = 5, 3.0
    setting = SyntheticConfig(
        "test", kind, 0.7, 0.3, 20, steps, growth, qk_init=start, ov_init=start, batch=16
    )
    plain = PlainAttention(kind, seed=7, start=start)
    names = dict(plain.named_parameters())
    rates = {name: 0.7 if name in ("qk", "key", "query") else 0.3 for name in names}
    qk, ov = build_circuits([setting], [7], torch.float64)
    tokens, classes = BatchStream(7, setting.length, setting.batch).sample_sequences(steps)
    for step in range(steps):
        inputs, labels = torch.from_numpy(tokens[step]), torch.from_numpy(classes[step]) + FIRST_LABEL_ID
        loss = nn.functional.cross_entropy(plain(inputs), labels)
        by = dict(zip(names, torch.autograd.grad(loss, names.values()), strict=True))
        counts = torch.from_numpy(count_tokens(tokens[step]))[None].double()
        one_hot = nn.functional.one_hot(torch.from_numpy(classes[step]), 4)[None].double()
        truth, by_scores, by_matrix = gradients(counts, one_hot, qk.value() / 50**0.5, ov.value())
        assert abs(truth.log().mean().item() + loss.item()) <= 1e-12

        queries = slice(FIRST_QUERY_ID, FIRST_QUERY_ID + 4)
        if "qk" in by:
            assert (by_scores[0] / 50**0.5 / 16 - by["qk"][queries]).abs().max() <= 1e-12
            untouched = torch.ones(50, dtype=torch.bool)
            untouched[queries] = False
            assert not by["qk"][untouched].any()  # the rows we leave out never learn
        if "ov" in by:
            assert (by_matrix[0] / 16 - by["ov"]).abs().max() <= 1e-12

        factor = 1 + (growth - 1) * step / steps
        qk.sgd_step(by_scores * (0.7 * factor / 50**0.5 / 16))
        ov.sgd_step(by_matrix * (0.3 / 16))
        with torch.no_grad():
            for name, weight in names.items():
                weight -= rates[name] * (factor if rates[name] == 0.7 else 1.0) * by[name]
    if isinstance(qk, FactorisedCircuit):
        assert (qk.left[0] - names["query"][:, queries].T).abs().max() <= 1e-12
        assert (qk.right[0] - names["key"]).abs().max() <= 1e-12
    else:
        assert (qk.matrix[0] - names["qk"][queries]).abs().max() <= 1e-12
    if isinstance(ov, CollapsedCircuit):
        assert (ov.matrix[0] - names["ov"]).abs().max() <= 1e-12
    else:
        assert (ov.left[0] - names["output"]).abs().max() <= 1e-12
        assert (ov.right[0] - names["value"]).abs().max() <= 1e-12


def test_the_loop_applies_rates_schedule_and_batches_as_written() -> None:
    """`train` over lanes of two settings and two seeds ends where the plain module ends for each of them."""
    settings = [
        SyntheticConfig(
            "slow", "FACO", 0.5, 0.5, 12, 300, 1.0, qk_init="uniform", ov_init="uniform", batch=8
        ),
        SyntheticConfig(
            "fast", "FACO", 2.0, 0.5, 12, 300, 2.0, qk_init="uniform", ov_init="uniform", batch=8
        ),
    ]
    outcomes = train_synthetic(settings, [3, 4], dtype=torch.float64)
    assert [(each.config.name, each.seed) for each in outcomes] == [
        ("slow", 3),
        ("slow", 4),
        ("fast", 3),
        ("fast", 4),
    ]
    for outcome in outcomes:
        setting, seed = outcome.config, outcome.seed
        plain = PlainAttention("FACO", seed, "uniform")
        stream = BatchStream(seed, setting.length, setting.batch)
        drawn = [stream.sample_sequences(250), stream.sample_sequences(50)]
        tokens, classes = (np.concatenate(parts) for parts in zip(*drawn, strict=True))
        for step in range(setting.steps):
            rate = setting.qk_lr * (1 + (setting.growth - 1) * step / setting.steps)
            loss = nn.functional.cross_entropy(
                plain(torch.from_numpy(tokens[step])), torch.from_numpy(classes[step]) + FIRST_LABEL_ID
            )
            by = torch.autograd.grad(loss, [plain.key, plain.query, plain.ov])
            with torch.no_grad():
                plain.key -= rate * by[0]
                plain.query -= rate * by[1]
                plain.ov -= setting.ov_lr * by[2]
        fresh, kinds = BatchStream(seed + 2**32, setting.length, 20_000).sample_sequences(1)
        with torch.no_grad():
            logits = plain(torch.from_numpy(fresh[0]))
        loss = nn.functional.cross_entropy(logits, torch.from_numpy(kinds[0]) + FIRST_LABEL_ID)
        assert outcome.loss == pytest.approx(loss.item(), abs=1e-10)


def test_the_task_is_drawn_as_described() -> None:
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


def test_balanced_batches_hold_every_class_equally() -> None:
    _, classes = BatchStream(0, 10, 32, balanced=True).sample_sequences(3)
    assert all(np.bincount(row).tolist() == [8] * 4 for row in classes)


def test_a_lane_that_reaches_its_loss_stops_alone() -> None:
    easy = {"kind": "CACO", "ov_lr": 5.0, "seq_len": 16, "ov_start": "uniform"}
    settings = [
        SyntheticConfig("stops", qk_lr=5.0, steps=2_000, stop_loss=0.5, **easy),
        SyntheticConfig("goes on", qk_lr=5.0, steps=750, **easy),
    ]
    heard = []
    outcomes = train_synthetic(settings, [0], on_progress=heard.append)
    assert outcomes[0].steps < 750
    assert outcomes[0].steps % 250 == 0
    assert outcomes[1].steps == 750
    assert sum(heard) == 2_000 + 750
    alone = train_synthetic(settings[1:], [0])[0]  # leaving a lane behind disturbs no other
    assert alone.loss == pytest.approx(outcomes[1].loss, rel=1e-4)


def test_a_faster_query_key_circuit_attends_more_to_distinct_tokens() -> None:
    common = {"kind": "CACO", "ov_lr": 0.3, "seq_len": 128, "steps": 1_500}
    slow, fast = train_synthetic(
        [SyntheticConfig("r=1", qk_lr=0.3, **common), SyntheticConfig("r=20", qk_lr=6.0, **common)], [0]
    )
    assert slow.heatmap.shape == (5, 5)
    assert slow.attention_histogram.sum() == pytest.approx(100)
    assert fast.mean_distinct_attention > slow.mean_distinct_attention + 0.1


def test_in_short_sequences_it_attends_to_the_query_instead() -> None:
    """The query names the class by itself; the shorter the sequence, the larger its share at the start."""
    (fast,) = train_synthetic([SyntheticConfig("r=20", "CACO", 6.0, 0.3, 32, 1_500)], [0])
    assert fast.mean_query_attention > 0.8
    assert fast.mean_distinct_attention < 0.2


def test_divergence_is_said_plainly() -> None:
    with pytest.raises(InputError, match="wild diverged"):
        train_synthetic([SyntheticConfig("wild", "CACO", 1e30, 1e30, 16, 500)], [0])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"kind": "FAFA"}, "unknown setting"),
        ({"qk_lr": 0.0}, "qk_lr must be positive"),
        ({"seq_len": 2}, "length 3 or more"),
        ({"batch_size": 0}, "batch size must be positive"),
        ({"ov_start": "ones"}, "unknown start"),
        ({"steps": 0}, "steps must be positive"),
    ],
)
def test_bad_settings_are_refused(wrong: dict, said: str) -> None:
    with pytest.raises(InputError, match=said):
        SyntheticConfig(**{"name": "x", "kind": "CACO"} | wrong)


def test_only_settings_of_one_shape_train_together() -> None:
    with pytest.raises(InputError, match="must agree"):
        train_synthetic([FIGURE_CONFIGS[0], FIGURE_CONFIGS[1]], [0])
