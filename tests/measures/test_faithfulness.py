"""Faithfulness against hand-computed values and the reference; attribution methods and their properties."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from input_errors import raises_code
from qkflow.measures.attribution import (
    ATTRIBUTION_METHODS,
    attention_rollout,
    integrated_gradients,
    max_attention,
    mean_attention,
)
from qkflow.measures.faithfulness import (
    DEFAULT_OPTIONS,
    PUBLISHED_OPTIONS,
    FaithfulnessOptions,
    Text,
    measure_faithfulness,
    measure_faithfulness_reference,
)


class TinyEncoder(nn.Module):
    """Two layers of masked attention with learned positions; the readout position is the last token."""

    def __init__(self, seed: int = 0, n_heads: int = 2, n_layers: int = 2, dim: int = 8) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.n_heads = n_heads
        self.embedding = nn.Embedding(40, dim)
        self.positions = nn.Embedding(160, dim)
        self.qkv = nn.ModuleList([nn.Linear(dim, 3 * dim) for _ in range(n_layers)])
        self.head = nn.Linear(dim, 3)
        self.double()
        for parameter in self.parameters():
            parameter.data.mul_(2)  # far from uniform attention

    def run(self, x: Tensor, mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = x + self.positions.weight[: x.shape[1]]
        layers = []
        for projection in self.qkv:
            q, k, v = (
                part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for part in projection(x).chunk(3, -1)
            )
            scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask[:, None, None], -torch.inf)
            layers.append(scores.softmax(-1))
            x = x + (layers[-1] @ v).transpose(1, 2).flatten(-2)
        readout = x[torch.arange(len(x)), self.readout_positions(mask)]
        return self.head(readout).softmax(-1), layers

    def readout_positions(self, attention_mask: Tensor) -> Tensor:
        return (attention_mask.long() * torch.arange(attention_mask.shape[1])).argmax(-1)

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids)

    def probabilities_from_embeddings(self, inputs_embeds: Tensor, attention_mask: Tensor) -> Tensor:
        return self.run(inputs_embeds, attention_mask)[0]

    def probabilities(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.run(self.embed(ids), attention_mask)[0]

    def probabilities_and_attentions(
        self, ids: Tensor, attention_mask: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        return self.run(self.embed(ids), attention_mask)


class BagOfWeights:
    """p(1) = sigmoid(sum of token weights); attention is proportional to the absolute token weight."""

    weights = torch.tensor([0.0, 4.0, 1.0, -2.0, 0.5], dtype=torch.float64)

    def probabilities(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        p = torch.sigmoid((self.weights[ids] * attention_mask).sum(-1))
        return torch.stack([1 - p, p], -1)

    def probabilities_and_attentions(
        self, ids: Tensor, attention_mask: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        size = self.weights[ids].abs() * attention_mask
        row = size / size.sum(-1, keepdim=True)
        return self.probabilities(ids, attention_mask), [row[:, None, None].expand(-1, 1, ids.shape[1], -1)]

    def readout_positions(self, attention_mask: Tensor) -> Tensor:
        return torch.zeros(len(attention_mask), dtype=torch.long)


class OneRow(BagOfWeights):
    """Returns the attention row of the readout position only."""

    def probabilities_and_attentions(
        self, ids: Tensor, attention_mask: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        probabilities, layers = super().probabilities_and_attentions(ids, attention_mask)
        return probabilities, [layers[0][:, :, :1]]


def random_texts(n_texts: int = 12, max_length: int = 30) -> list[Text]:
    rng = np.random.default_rng(1)
    texts = []
    for index in range(n_texts):
        length = int(rng.integers(1, max_length)) if index else 1
        marks = [(rng.random(length) < 0.4).tolist() for _ in range(int(rng.integers(0, 4)))]
        texts.append(Text(f"{index}", rng.integers(0, 40, length).tolist(), marks))
    return texts


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def test_measures_match_hand_computed_values() -> None:
    text = Text("a", [1, 2, 3, 4], [[True, False, False, False]])  # weights 4, 1, −2, 0.5: p(1) = σ(3.5)
    found = measure_faithfulness(BagOfWeights(), [text], method="attention", ks=[5, 50], threshold=0.5)
    assert found.mass[0] == pytest.approx(4 / 7.5)
    assert found.confidence == 1.0
    assert found.comprehensiveness[5][0] == pytest.approx(sigmoid(3.5) - sigmoid(-0.5))  # without token 1
    assert found.sufficiency[5][0] == pytest.approx(sigmoid(3.5) - sigmoid(4))
    assert found.comprehensiveness[50][0] == pytest.approx(
        sigmoid(3.5) - sigmoid(1.5)
    )  # without tokens 1 and 3
    assert found.sufficiency[50][0] == pytest.approx(sigmoid(3.5) - sigmoid(2))
    summary = found.summary()
    mean = (found.comprehensiveness[5][0] + found.comprehensiveness[50][0]) / 2
    assert summary["aopc_comprehensiveness"] == pytest.approx(mean)


def test_measures_use_the_predicted_class() -> None:
    found = measure_faithfulness(BagOfWeights(), [Text("a", [3, 4])], method="attention")  # p(0) = σ(1.5)
    assert found.comprehensiveness[5.0][0] == pytest.approx(sigmoid(1.5) - sigmoid(-0.5))


@pytest.mark.parametrize("method", ATTRIBUTION_METHODS)
@pytest.mark.parametrize(
    "options",
    [DEFAULT_OPTIONS, PUBLISHED_OPTIONS, FaithfulnessOptions(pad_to_length=48)],
    ids=["default", "published", "padded"],
)
def test_batched_matches_reference(method: str, options: FaithfulnessOptions) -> None:
    texts = random_texts(6 if method == "gradient" else 12)
    model, ks = TinyEncoder(), [1, 5, 20, 50]
    with torch.no_grad():
        batched = measure_faithfulness(model, texts, method, ks, options=options, batch_tokens=200)
        single = measure_faithfulness_reference(model, texts, method, ks, options=options)
    assert np.array_equal(np.isnan(batched.mass), np.isnan(single.mass))
    assert np.nanmax(np.abs(batched.mass - single.mass)) <= 1e-12
    for k in ks:
        assert np.abs(batched.comprehensiveness[k] - single.comprehensiveness[k]).max() <= 1e-12
        assert np.abs(batched.sufficiency[k] - single.sufficiency[k]).max() <= 1e-12
    assert batched.n_emptied == single.n_emptied > 0  # some texts are one token long
    assert batched.summary()["confidence"] == single.summary()["confidence"]


def test_length_excludes_padding_unless_published() -> None:
    """5% of 128 padded positions is ⌈6.4⌉ = 7 tokens to delete; of 20 tokens it is 1."""
    text = Text("a", list(range(1, 21)))
    model = TinyEncoder()
    default = measure_faithfulness(model, [text], "attention").sufficiency[5.0][0]
    ids = torch.tensor([text.ids])
    mask = torch.ones_like(ids, dtype=torch.bool)
    p, predicted = model.probabilities(ids, mask).max(-1)
    top = mean_attention(model.probabilities_and_attentions(ids, mask)[1], model.readout_positions(mask))[
        0
    ].argsort(descending=True)
    top_only = ids[:, top[:1]]
    expected = p - model.probabilities(top_only, torch.ones_like(top_only, dtype=torch.bool))[0, predicted]
    assert default == pytest.approx(expected.item(), abs=1e-12)
    padded = torch.nn.functional.pad(ids, (0, 108))
    padded_mask = torch.arange(128)[None] < 20
    first, second = (layer.mean(1) for layer in model.probabilities_and_attentions(padded, padded_mask)[1])
    rollout = second[:, -1] @ first[0]  # published: rollout of the last position, no residual
    kept = rollout[0].argsort(descending=True)[:7].sort().values
    expected = model.probabilities(padded, padded_mask)[0, predicted]
    expected = expected - model.probabilities(padded[:, kept], padded_mask[:, kept])[0, predicted]
    found = measure_faithfulness(model, [text], options=PUBLISHED_OPTIONS).sufficiency[5.0][0]
    assert found == pytest.approx(expected.item(), abs=1e-12)


def test_texts_without_rationale_are_counted_not_averaged() -> None:
    marked = Text("marked", [1, 2], [[True, False]])
    empty = Text("empty", [1, 2], [[False, False]])
    unmarked = Text("unmarked", [1, 2])
    found = measure_faithfulness(BagOfWeights(), [marked, empty, unmarked], method="attention", threshold=0.5)
    assert (found.n_without_rationale, found.confidence) == (2, 1.0)
    assert found.summary()["mass"] == pytest.approx(0.8)
    published = measure_faithfulness(
        BagOfWeights(), [marked, empty, unmarked], threshold=0.2, options=PUBLISHED_OPTIONS
    )
    assert published.n_without_rationale == 0
    assert published.summary()["mass"] == pytest.approx(0.8 / 3 / 3)  # three annotators, three texts
    assert published.confidence == pytest.approx(1 / 3)
    none = measure_faithfulness(BagOfWeights(), [unmarked], method="attention")
    assert none.confidence is None
    assert none.summary()["mass"] is None


def test_rationale_is_the_majority_vote() -> None:
    marks = [[True, True, False], [True, False, False], [False, False, True]]
    found = measure_faithfulness(BagOfWeights(), [Text("a", [1, 2, 3], marks)], method="attention")
    assert found.mass[0] == pytest.approx(4 / 7)


def test_attention_rollout_matches_layer_product() -> None:
    torch.manual_seed(0)
    layers = [torch.rand(3, 2, 5, 5, dtype=torch.float64).softmax(-1) for _ in range(3)]
    readout = torch.tensor([4, 0, 2])
    product = torch.eye(5, dtype=torch.float64).expand(3, 5, 5)
    for layer in layers:
        product = (0.3 * torch.eye(5) + 0.7 * layer.mean(1)) @ product
    expected = product[torch.arange(3), readout]
    assert torch.allclose(attention_rollout(layers, readout, residual=0.3), expected, atol=1e-14)
    assert torch.allclose(
        attention_rollout(layers[:1], readout, 0.0), mean_attention(layers[:1], readout), atol=1e-14
    )
    assert (max_attention(layers, readout) >= mean_attention(layers, readout) - 1e-15).all()
    one_row = layers[-1][torch.arange(3), :, readout][:, :, None]  # of the last layer, the readout row
    for score in (attention_rollout, mean_attention, max_attention):
        assert torch.allclose(score([*layers[:-1], one_row], readout), score(layers, readout), atol=1e-14)


def test_integrated_gradients_completeness() -> None:
    """The scores of a text sum to p(text) − p(zero embeddings)."""
    model = TinyEncoder()
    ids = torch.randint(0, 40, (4, 9))
    mask = torch.arange(9)[None] < torch.tensor([9, 4, 1, 7])[:, None]
    targets = model.probabilities(ids, mask).argmax(-1)
    found = integrated_gradients(model, ids, mask, targets, n_steps=150)
    baseline = model.probabilities_from_embeddings(torch.zeros(4, 9, 8, dtype=torch.float64), mask)
    difference = (model.probabilities(ids, mask) - baseline).gather(1, targets[:, None])[:, 0]
    assert torch.allclose(found.sum(-1), difference, atol=2e-3)
    assert not found[~mask].any()


def test_faithful_methods_beat_random_if_one_token_decides() -> None:
    """The model depends on token 1 only: faithful scores rank it first, random scores do not."""

    class OneToken(BagOfWeights):
        weights = torch.tensor([0.0, 6.0] + [0.0] * 38, dtype=torch.float64)
        table = torch.eye(40, dtype=torch.float64)

        def embed(self, ids: Tensor) -> Tensor:
            return self.table[ids]

        def probabilities_from_embeddings(self, inputs_embeds: Tensor, attention_mask: Tensor) -> Tensor:
            p = torch.sigmoid((inputs_embeds @ self.weights * attention_mask).sum(-1))
            return torch.stack([1 - p, p], -1)

    rng = np.random.default_rng(0)
    texts = [Text(str(index), rng.permutation([1, *rng.integers(2, 40, 19)]).tolist()) for index in range(40)]
    means = {
        method: measure_faithfulness(OneToken(), texts, method).summary()["aopc_comprehensiveness"]
        for method in ("gradient", "attention", "random")
    }
    assert means["gradient"] == pytest.approx(sigmoid(6) - 0.5, abs=1e-9)
    assert means["attention"] == pytest.approx(sigmoid(6) - 0.5, abs=1e-9)
    assert means["random"] < 0.2


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: Text("p7", [1, 2, 3], [[True]]), "rationale-length-mismatch"),
        (lambda: Text("p8", []), "empty-text"),
        (lambda: measure_faithfulness(BagOfWeights(), []), "no-texts"),
        (
            lambda: measure_faithfulness(OneRow(), [Text("a", [1])], options=PUBLISHED_OPTIONS),
            "attention-rows-missing",
        ),
        (lambda: measure_faithfulness(BagOfWeights(), [Text("a", [1])], ks=[0]), "invalid-percentage"),
        (
            lambda: measure_faithfulness(BagOfWeights(), [Text("a", [1])], method="rolout"),
            "unknown-attribution-method",
        ),
        (
            lambda: measure_faithfulness(BagOfWeights(), [Text("a", [1])], method="gradient"),
            "model-without-embeddings",
        ),
    ],
)
def test_invalid_input_raises(call: Callable[[], object], code: str) -> None:
    with raises_code(code):
        call()
