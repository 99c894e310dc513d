from __future__ import annotations

import pytest
import torch

from qkflow.models import Decoder, ModelConfig
from qkflow.models.config import AttentionConfig
from qkflow.studies.finetune.config import FinetuneTrainConfig
from qkflow.studies.finetune.run import TaskBatches, build_classifier, build_optimizer
from qkflow.studies.pace.dataset import EncodedExample
from qkflow.studies.pace.task_model import TaskModel, pad_batch

EXAMPLES = [EncodedExample(str(i), [1 + i % 7] * (1 + i % 5), i % 2) for i in range(21)]


def classifier(coupling: str = "none", seed: int = 0) -> TaskModel:
    config = ModelConfig(11, n_layers=2, dim=16, n_heads=2, attention=AttentionConfig(coupling=coupling))
    return build_classifier(Decoder(config, seed=7), 2, seed)


def test_head_is_paired_over_models_by_seed() -> None:
    first, other = classifier("none"), classifier("euler")
    assert first.head is not None
    assert other.head is not None
    assert torch.equal(first.head.weight, other.head.weight)
    assert first.head.weight.abs().sum() > 0
    third = classifier(seed=1).head
    assert third is not None
    assert not torch.equal(first.head.weight, third.weight)


@pytest.mark.parametrize("coupling", ["none", "euler"])
def test_padding_does_not_change_the_logits(coupling: str) -> None:
    model = classifier(coupling).double().eval()
    ids, mask = pad_batch([example.ids for example in EXAMPLES[:5]])
    together = model.logits(ids, mask)
    for row, example in zip(together, EXAMPLES, strict=False):
        hidden = model.decoder(torch.tensor([example.ids]))
        assert model.head is not None
        torch.testing.assert_close(row, model.head(hidden[0, -1]))


def test_batches_are_a_function_of_seed_and_step() -> None:
    batches = TaskBatches(EXAMPLES, 4, seed=3)
    assert batches.steps_per_epoch == 6
    forward = [batches.batch(step) for step in range(12)]
    again = TaskBatches(EXAMPLES, 4, seed=3)
    assert [again.batch(step) for step in reversed(range(12))] == forward[::-1]
    for epoch in (forward[:6], forward[6:]):
        assert sorted(int(x.name) for batch in epoch for x in batch) == list(range(21))
    assert forward[:6] != forward[6:]
    assert [TaskBatches(EXAMPLES, 4, seed=4).batch(step) for step in range(12)] != forward


def test_all_weights_are_trained() -> None:
    model = classifier("euler")
    optimizer = build_optimizer(model, FinetuneTrainConfig(1, 4, 1e-2, 0.0, 0))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.loss(EXAMPLES[:4]).backward()
    optimizer.step()
    assert {group.role for group in optimizer.param_groups} >= {"q", "coupling", "embed", "head"}
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
