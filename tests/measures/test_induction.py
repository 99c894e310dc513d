from __future__ import annotations

import pytest
import torch

from qkflow.measures.induction import copy_gain, head_scores, induction_metrics, repeated_sequences
from qkflow.models import Decoder, preset

MODEL = Decoder(preset("tiny", vocab_size=64, n_layers=2), seed=0)


def test_repeated_sequences_are_fixed_and_repeated() -> None:
    ids = repeated_sequences(64, 3, 10)
    assert ids.shape == (3, 20)
    assert torch.equal(ids[:, :10], ids[:, 10:])
    assert torch.equal(ids, repeated_sequences(64, 3, 10))


@pytest.mark.parametrize(("shift", "name"), [(-1, "previous_token"), (None, "induction")])
def test_scores_of_a_perfect_head(shift: int | None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are one exactly where the score is read."""
    ids = repeated_sequences(64, 2, 8)
    weights = torch.zeros(2, 4, 16, 16)
    offset = 1 - 8 if shift is None else shift
    weights.diagonal(offset, dim1=-2, dim2=-1).fill_(1.0)
    for block in MODEL.blocks:
        monkeypatch.setattr(block.attention, "reference", lambda x: (x, weights))
    scores = head_scores(MODEL, ids)
    assert all(value == 1.0 for heads in scores[name] for value in heads)
    other = "induction" if name == "previous_token" else "previous_token"
    assert all(value == 0.0 for heads in scores[other] for value in heads)


def test_untrained_model_neither_copies_nor_attends_by_induction() -> None:
    metrics = induction_metrics(MODEL)
    assert len(metrics["induction_score"]) == len(metrics["previous_token_score"]) == 2  # type: ignore[arg-type]
    assert max(metrics["induction_score"]) < 0.05  # type: ignore[type-var]
    assert abs(copy_gain(MODEL, repeated_sequences(64))) < 0.1
    assert MODEL.training  # the mode is restored


def test_a_model_that_has_learned_to_copy_has_a_gain() -> None:
    model = Decoder(preset("tiny", vocab_size=16, n_layers=2, init="modern"), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(150):
        half = torch.randint(16, (16, 12), generator=generator)
        ids = torch.cat((half, half), dim=1)
        loss = model.loss(model(ids[:, :-1]), ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert copy_gain(model, repeated_sequences(16, 8, 12)) > 0.5
