"""The task model: padding, direction of attention, answer generation, paired seeds."""

from __future__ import annotations

import torch

from qkflow.roles import parameter_roles
from qkflow.studies.pace.dataset import TaskData
from qkflow.studies.pace.run import build_optimizer, optimizer_step
from qkflow.studies.pace.task_model import pad_batch
from toy_task import small_model, train_config


def test_padding_does_not_change_probabilities(agreement: TaskData) -> None:
    model = small_model(agreement)
    short, *_, long = sorted(agreement.test, key=lambda item: len(item.ids))
    alone = model.probabilities(*pad_batch([short.ids]))
    padded, layers = model.probabilities_and_attentions(*pad_batch([short.ids, long.ids]))
    torch.testing.assert_close(alone[0], padded[0])
    assert layers[0][0, :, : len(short.ids), len(short.ids) :].abs().max() == 0


def test_classifier_is_bidirectional(agreement: TaskData) -> None:
    _, layers = small_model(agreement).probabilities_and_attentions(*pad_batch([agreement.test[0].ids]))
    assert layers[0].triu(1).abs().max() > 0


def test_answer_model_is_causal(squad: TaskData) -> None:
    _, layers = small_model(squad, "squad").probabilities_and_attentions(*pad_batch([squad.test[0].ids]))
    assert layers[0].triu(1).abs().max() == 0


def test_generated_answers_match_trained_answers(squad: TaskData) -> None:
    model, examples = small_model(squad, "squad"), squad.train[:2]
    config = train_config(steps=150, lr=2e-2)
    optimizer = build_optimizer(model, config)
    for step in range(config.steps):
        optimizer_step(optimizer, model.loss(examples), config, step, max_grad_norm=1.0)
    assert float(model.loss(examples).detach()) < 0.1
    answers = model.generate_answers(examples, squad.eos_token_id)
    assert answers == [item.answer_ids[:-1] for item in examples]


def test_models_of_one_seed_are_equal(agreement: TaskData) -> None:
    model, same = small_model(agreement, seed=3), small_model(agreement, seed=3)
    for a, b in zip(model.parameters(), same.parameters(), strict=True):
        assert torch.equal(a, b)


def test_every_parameter_has_a_role(agreement: TaskData) -> None:
    assert set(parameter_roles(small_model(agreement)).values()) >= {"q", "k", "v", "o", "head"}
