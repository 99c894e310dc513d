"""The measures against their definitions: by hand, one by one, and against the properties they promise."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qkflow.errors import InputError
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
    """Two layers of masked attention, embeddings with positions; the class is read at the last real token."""

    def __init__(self, seed: int = 0, heads: int = 2, layers: int = 2, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.heads = heads
        self.embedding = nn.Embedding(40, width)
        self.positions = nn.Embedding(160, width)
        self.qkv = nn.ModuleList([nn.Linear(width, 3 * width) for _ in range(layers)])
        self.head = nn.Linear(width, 3)
        self.double()
        for parameter in self.parameters():
            parameter.data.mul_(2)  # far from uniform attention

    def run(self, x: Tensor, mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = x + self.positions.weight[: x.shape[1]]
        layers = []
        for projection in self.qkv:
            q, k, v = (
                part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in projection(x).chunk(3, -1)
            )
            scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask[:, None, None], -torch.inf)
            layers.append(scores.softmax(-1))
            x = x + (layers[-1] @ v).transpose(1, 2).flatten(-2)
        read = x[torch.arange(len(x)), self.read(mask)]
        return self.head(read).softmax(-1), layers

    def read(self, mask: Tensor) -> Tensor:
        return (mask.long() * torch.arange(mask.shape[1])).argmax(-1)

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids)

    def probabilities_of(self, embedded: Tensor, mask: Tensor) -> Tensor:
        return self.run(embedded, mask)[0]

    def probabilities(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.run(self.embed(ids), mask)[0]

    def attend(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        return self.run(self.embed(ids), mask)


class BagOfWeights:
    """p(1) = sigmoid(sum of the tokens' weights); attends to a token as its weight's size says."""

    weights = torch.tensor([0.0, 4.0, 1.0, -2.0, 0.5], dtype=torch.float64)

    def probabilities(self, ids: Tensor, mask: Tensor) -> Tensor:
        p = torch.sigmoid((self.weights[ids] * mask).sum(-1))
        return torch.stack([1 - p, p], -1)

    def attend(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        size = self.weights[ids].abs() * mask
        row = size / size.sum(-1, keepdim=True)
        return self.probabilities(ids, mask), [row[:, None, None].expand(-1, 1, ids.shape[1], -1)]

    def read(self, mask: Tensor) -> Tensor:
        return torch.zeros(len(mask), dtype=torch.long)


class OneRow(BagOfWeights):
    """Gives the row that is read and no other."""

    def attend(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        probabilities, layers = super().attend(ids, mask)
        return probabilities, [layers[0][:, :, :1]]


def some_texts(number: int = 12, longest: int = 30) -> list[Text]:
    random = np.random.default_rng(1)
    texts = []
    for index in range(number):
        length = int(random.integers(1, longest)) if index else 1
        marks = [(random.random(length) < 0.4).tolist() for _ in range(int(random.integers(0, 4)))]
        texts.append(Text(f"{index}", random.integers(0, 40, length).tolist(), marks))
    return texts


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def test_by_hand() -> None:
    text = Text("a", [1, 2, 3, 4], [[True, False, False, False]])  # weights 4, 1, −2, 0.5: p(1) = σ(3.5)
    found = measure_faithfulness(BagOfWeights(), [text], method="attention", ks=[5, 50], threshold=0.5)
    assert found.mass[0] == pytest.approx(4 / 7.5)
    assert found.confidence == 1.0
    assert found.comprehensiveness[5][0] == pytest.approx(sigmoid(3.5) - sigmoid(-0.5))  # token 1 gone
    assert found.sufficiency[5][0] == pytest.approx(sigmoid(3.5) - sigmoid(4))
    assert found.comprehensiveness[50][0] == pytest.approx(sigmoid(3.5) - sigmoid(1.5))  # 1 and 3 gone
    assert found.sufficiency[50][0] == pytest.approx(sigmoid(3.5) - sigmoid(2))
    summary = found.summary()
    mean = (found.comprehensiveness[5][0] + found.comprehensiveness[50][0]) / 2
    assert summary["aopc_comprehensiveness"] == pytest.approx(mean)


def test_the_predicted_class_is_the_one_measured() -> None:
    found = measure_faithfulness(BagOfWeights(), [Text("a", [3, 4])], method="attention")  # p(0) = σ(1.5)
    assert found.comprehensiveness[5.0][0] == pytest.approx(sigmoid(1.5) - sigmoid(-0.5))


@pytest.mark.parametrize("source", ATTRIBUTION_METHODS)
@pytest.mark.parametrize(
    "rules",
    [DEFAULT_OPTIONS, PUBLISHED_OPTIONS, FaithfulnessOptions(pad_to_length=48)],
    ids=["ours", "published", "padded"],
)
def test_batched_equals_one_by_one(source: str, rules: FaithfulnessOptions) -> None:
    texts = some_texts(6 if source == "gradient" else 12)
    model, ks = TinyEncoder(), [1, 5, 20, 50]
    with torch.no_grad():
        batched = measure_faithfulness(model, texts, source, ks, options=rules, batch_tokens=200)
        single = measure_faithfulness_reference(model, texts, source, ks, options=rules)
    assert np.array_equal(np.isnan(batched.mass), np.isnan(single.mass))
    assert np.nanmax(np.abs(batched.mass - single.mass)) <= 1e-12
    for k in ks:
        assert np.abs(batched.comprehensiveness[k] - single.comprehensiveness[k]).max() <= 1e-12
        assert np.abs(batched.sufficiency[k] - single.sufficiency[k]).max() <= 1e-12
    assert batched.n_emptied == single.n_emptied > 0  # some texts are one token long
    assert batched.summary()["confidence"] == single.summary()["confidence"]


def test_length_means_real_tokens_unless_published() -> None:
    """128 padded places give k = ⌈6.4⌉ = 7 tokens to delete; 20 real ones give 1."""
    text = Text("a", list(range(1, 21)))
    model = TinyEncoder()
    ours = measure_faithfulness(model, [text], "attention").sufficiency[5.0][0]
    ids = torch.tensor([text.ids])
    mask = torch.ones_like(ids, dtype=torch.bool)
    p, predicted = model.probabilities(ids, mask).max(-1)
    top = mean_attention(model.attend(ids, mask)[1], model.read(mask))[0].argsort(descending=True)
    alone = ids[:, top[:1]]
    expected = p - model.probabilities(alone, torch.ones_like(alone, dtype=torch.bool))[0, predicted]
    assert ours == pytest.approx(expected.item(), abs=1e-12)
    padded = torch.nn.functional.pad(ids, (0, 108))
    real = torch.arange(128)[None] < 20
    first, second = (layer.mean(1) for layer in model.attend(padded, real)[1])
    flow = second[:, -1] @ first[0]  # published: rollout at the last place, no residual
    kept = flow[0].argsort(descending=True)[:7].sort().values
    expected = model.probabilities(padded, real)[0, predicted]
    expected = expected - model.probabilities(padded[:, kept], real[:, kept])[0, predicted]
    found = measure_faithfulness(model, [text], options=PUBLISHED_OPTIONS).sufficiency[5.0][0]
    assert found == pytest.approx(expected.item(), abs=1e-12)


def test_empty_rationales_are_counted_not_averaged() -> None:
    marked = Text("marked", [1, 2], [[True, False]])
    empty = Text("empty", [1, 2], [[False, False]])
    nobody = Text("nobody", [1, 2])
    found = measure_faithfulness(BagOfWeights(), [marked, empty, nobody], method="attention", threshold=0.5)
    assert (found.n_without_rationale, found.confidence) == (2, 1.0)
    assert found.summary()["mass"] == pytest.approx(0.8)
    published = measure_faithfulness(
        BagOfWeights(), [marked, empty, nobody], threshold=0.2, options=PUBLISHED_OPTIONS
    )
    assert published.n_without_rationale == 0
    assert published.summary()["mass"] == pytest.approx(0.8 / 3 / 3)  # of three annotators, of three texts
    assert published.confidence == pytest.approx(1 / 3)
    none = measure_faithfulness(BagOfWeights(), [nobody], method="attention")
    assert none.confidence is None
    assert none.summary()["mass"] is None


def test_a_rationale_is_what_most_annotators_marked() -> None:
    marks = [[True, True, False], [True, False, False], [False, False, True]]
    found = measure_faithfulness(BagOfWeights(), [Text("a", [1, 2, 3], marks)], method="attention")
    assert found.mass[0] == pytest.approx(4 / 7)


def test_rollout_is_the_product_of_layers() -> None:
    torch.manual_seed(0)
    layers = [torch.rand(3, 2, 5, 5, dtype=torch.float64).softmax(-1) for _ in range(3)]
    read = torch.tensor([4, 0, 2])
    product = torch.eye(5, dtype=torch.float64).expand(3, 5, 5)
    for layer in layers:
        product = (0.3 * torch.eye(5) + 0.7 * layer.mean(1)) @ product
    expected = product[torch.arange(3), read]
    assert torch.allclose(attention_rollout(layers, read, residual=0.3), expected, atol=1e-14)
    assert torch.allclose(
        attention_rollout(layers[:1], read, 0.0), mean_attention(layers[:1], read), atol=1e-14
    )
    assert (max_attention(layers, read) >= mean_attention(layers, read) - 1e-15).all()
    one_row = layers[-1][torch.arange(3), :, read][:, :, None]  # all that is needed of the last layer
    for ranking in (attention_rollout, mean_attention, max_attention):
        assert torch.allclose(ranking([*layers[:-1], one_row], read), ranking(layers, read), atol=1e-14)


def test_integrated_gradients_add_up() -> None:
    """Completeness: the scores of a text sum to p(text) − p(zero embeddings)."""
    model = TinyEncoder()
    ids = torch.randint(0, 40, (4, 9))
    mask = torch.arange(9)[None] < torch.tensor([9, 4, 1, 7])[:, None]
    chosen = model.probabilities(ids, mask).argmax(-1)
    found = integrated_gradients(model, ids, mask, chosen, n_steps=150)
    nothing = model.probabilities_of(torch.zeros(4, 9, 8, dtype=torch.float64), mask)
    gained = (model.probabilities(ids, mask) - nothing).gather(1, chosen[:, None])[:, 0]
    assert torch.allclose(found.sum(-1), gained, atol=2e-3)
    assert not found[~mask].any()


def test_a_gradient_ranking_beats_chance_where_one_token_decides() -> None:
    """On a model that looks at token 1 alone, an honest ranking deletes it first; a random one does not."""

    class OneToken(BagOfWeights):
        weights = torch.tensor([0.0, 6.0] + [0.0] * 38, dtype=torch.float64)
        table = torch.eye(40, dtype=torch.float64)

        def embed(self, ids: Tensor) -> Tensor:
            return self.table[ids]

        def probabilities_of(self, embedded: Tensor, mask: Tensor) -> Tensor:
            p = torch.sigmoid((embedded @ self.weights * mask).sum(-1))
            return torch.stack([1 - p, p], -1)

    random = np.random.default_rng(0)
    texts = [
        Text(str(index), random.permutation([1, *random.integers(2, 40, 19)]).tolist()) for index in range(40)
    ]
    means = {
        source: measure_faithfulness(OneToken(), texts, source).summary()["aopc_comprehensiveness"]
        for source in ("gradient", "attention", "random")
    }
    assert means["gradient"] == pytest.approx(sigmoid(6) - 0.5, abs=1e-9)
    assert means["attention"] == pytest.approx(sigmoid(6) - 0.5, abs=1e-9)
    assert means["random"] < 0.2


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Text("p7", [1, 2, 3], [[True]]), "post p7: a rationale covers 1 tokens, the text has 3"),
        (lambda: Text("p8", []), "post p8 has no tokens"),
        (lambda: measure_faithfulness(BagOfWeights(), []), "no texts"),
        (
            lambda: measure_faithfulness(OneRow(), [Text("a", [1])], options=PUBLISHED_OPTIONS),
            "must give all of its rows",
        ),
        (lambda: measure_faithfulness(BagOfWeights(), [Text("a", [1])], ks=[0]), "k is a percentage"),
        (
            lambda: measure_faithfulness(BagOfWeights(), [Text("a", [1])], method="rolout"),
            "did you mean 'rollout'",
        ),
        (
            lambda: measure_faithfulness(BagOfWeights(), [Text("a", [1])], method="gradient"),
            "needs a model with embed",
        ),
    ],
)
def test_bad_input_is_refused(make: Sequence[object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        make()
