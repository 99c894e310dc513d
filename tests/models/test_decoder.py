"""Options of the decoder: logit softcap, embedding norm, fixed gain of the query-key norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qkflow.attention import Attention
from qkflow.models import Decoder, preset
from qkflow.models.loss import linear_cross_entropy
from qkflow.roles import parameter_roles


def small_model(**options: Any) -> Decoder:
    config = {"vocab_size": 50, "n_layers": 2, "dim": 32, "n_heads": 4, "init": "fan_in", **options}
    return Decoder(preset("tiny", **config), seed=0, dtype=torch.float64)


def make_ids(length: int = 12) -> Tensor:
    return torch.randint(50, (2, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("tied", [True, False])
def test_softcap_of_logits_and_loss(tied: bool) -> None:
    model = small_model(logit_softcap=0.8, tie_embeddings=tied)
    plain = small_model(tie_embeddings=tied)
    ids = make_ids()
    hidden = model(ids)
    logits = model.logits(hidden)
    torch.testing.assert_close(logits, 0.8 * torch.tanh(plain.logits(hidden) / 0.8))
    assert plain.logits(hidden).abs().max() > 0.8 > logits.abs().max()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
    torch.testing.assert_close(model.loss(hidden, ids), expected)
    total = model.loss(hidden, ids, reduction="sum")
    torch.testing.assert_close(total, expected * ids.numel())


def test_loss_without_softcap_is_the_linear_cross_entropy() -> None:
    model, ids = small_model(), make_ids()
    hidden = model(ids)
    assert torch.equal(model.loss(hidden, ids), linear_cross_entropy(hidden, model.output_weight, ids))


@pytest.mark.parametrize("slow", [None, {"ratio": 3, "gate_init": 0.5}])
def test_embedding_norm_comes_before_both_paths(slow: dict[str, Any] | None) -> None:
    model, plain = (small_model(embedding_norm=norm, slow=slow) for norm in (True, False))
    ids = make_ids()
    embedded = model.embedding(ids)
    normed = embedded / (embedded.square().mean(-1, keepdim=True) + model.config.norm_eps).sqrt()
    torch.testing.assert_close(model(ids), plain.forward_embeddings(normed))
    assert torch.equal(model(ids), model.forward_embeddings(embedded))
    assert not torch.allclose(model(ids), plain(ids))
    assert parameter_roles(model)["embedding_norm.weight"] == "norm"
    assert "embedding_norm.weight" not in plain.state_dict()


def test_cached_decoding_with_embedding_norm_and_slow_path() -> None:
    model, ids = small_model(embedding_norm=True, slow={"ratio": 3, "gate_init": 0.5}), make_ids()
    caches = model.new_caches(2, 12)
    pieces = [model(ids[:, begin:end], caches=caches) for begin, end in ((0, 5), (5, 6), (6, 12))]
    torch.testing.assert_close(torch.cat(pieces, 1), model(ids), rtol=0, atol=1e-12)


@pytest.mark.parametrize("scoring", ["softmax", "differential"])
def test_qk_norm_gain_multiplies_scores(scoring: str) -> None:
    """A fixed gain equals learned norms whose query weight is that number."""
    options: dict[str, Any] = {"scoring": scoring, "qk_norm": True, "seed": 0, "dtype": torch.float64}
    fixed = Attention(32, 4, init="fan_in", qk_norm_gain=2.5, **options)
    learned = Attention(32, 4, init="fan_in", **options)
    assert {name for name, _ in fixed.named_parameters()} == {
        name for name, _ in learned.named_parameters() if "_norm" not in name or "scoring" in name
    }
    assert learned.q_norm is not None
    with torch.no_grad():
        learned.q_norm.weight.fill_(2.5)
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    torch.testing.assert_close(fixed(x), learned(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fixed.reference(x), learned.reference(x), rtol=1e-12, atol=1e-12)
