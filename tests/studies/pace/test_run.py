"""One run: learning rates per role, batches, training and measuring."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from qkflow.measures.circuits import CircuitTracker
from qkflow.studies.pace.config import PaceRunConfig, PaceStudyConfig, PaceTrainConfig
from qkflow.studies.pace.dataset import DataLimits, TaskData, prepare_task_data, save_task_data
from qkflow.studies.pace.recipes import PUBLISHED_RECIPES
from qkflow.studies.pace.results import RunResult
from qkflow.studies.pace.run import build_optimizer, iter_batches, optimizer_step, train_and_measure
from qkflow.studies.pace.study import plan_runs
from qkflow.studies.pace.task_model import TaskModel
from qkflow.training.step import NonFiniteError
from toy_task import small_model, train_config


def learning_rates(model: TaskModel, config: PaceTrainConfig) -> dict[str, float]:
    """Return the learning rate by role in the middle of training, for a base rate of 1."""
    optimizer = build_optimizer(model, config)
    for group in optimizer.param_groups:
        group.set_lr(1.0, 0.5)
    return {group.role: group.lr for group in optimizer.param_groups}


def test_ratio_scales_the_query_key_learning_rate_alone(agreement: TaskData) -> None:
    same = learning_rates(small_model(agreement), train_config())
    faster = learning_rates(small_model(agreement), train_config(ratio="30"))
    assert set(same.values()) == {1.0}
    assert faster == {role: 30.0 if role in ("q", "k") else 1.0 for role in same}
    increasing = learning_rates(small_model(agreement), train_config(ratio="increasing:41"))
    assert increasing["q"] == 21.0


@pytest.mark.parametrize("task", PUBLISHED_RECIPES)
def test_published_confounds_change_the_learning_rates(agreement: TaskData, task: str) -> None:
    config = PaceStudyConfig(task, data="somewhere", as_published=True, seeds=1)  # type: ignore[arg-type]
    same, faster = (
        PaceRunConfig.from_dict(run.config).train
        for run in plan_runs(config, config.resolve_recipe(), "x", agreement.mean_length, 10)
    )
    assert (same.scale_embed_lr, same.other_lr_scale, same.freeze) == (False, 1.0, ())
    rates = learning_rates(small_model(agreement), faster)
    if task == "squad":
        assert rates["q"] == pytest.approx(2.0)  # 1e-3, against 5e-4 of the baseline
        assert rates["v"] == rates["embed"] == pytest.approx(0.1)
    else:
        assert rates["embed"] == rates["k"] == float(faster.ratio)
        assert rates["v"] == 1
        assert ("mlp" in rates) == (task == "agreement")


def test_batch_order_depends_on_the_seed_alone(agreement: TaskData) -> None:
    orders = [[item.name for item in next(iter_batches(agreement.train, 8, seed))] for seed in (3, 3, 4)]
    assert orders[0] == orders[1] != orders[2]


def test_sgd_matches_torch(agreement: TaskData) -> None:
    model, reference = small_model(agreement), small_model(agreement)
    optimizer = build_optimizer(model, train_config(optimizer="sgd", lr=1e-2, weight_decay=1e-3))
    matrices = [p for p in reference.parameters() if p.dim() >= 2]
    vectors = [p for p in reference.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 1e-3}, {"params": vectors, "weight_decay": 0.0}]
    expected = torch.optim.SGD(groups, lr=1e-2, momentum=0.99)
    for _ in range(3):
        for trained, one in ((model, optimizer), (reference, expected)):
            one.zero_grad()
            trained.loss(agreement.train[:8]).backward()
            one.step()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_ratio_raises_the_effective_pace(agreement: TaskData) -> None:
    paces = []
    for ratio in ("1", "10"):
        model, config = small_model(agreement), train_config(ratio=ratio)
        optimizer, tracker = build_optimizer(model, config), CircuitTracker(model)
        for step, items in zip(range(10), iter_batches(agreement.train, 16, 0), strict=False):
            optimizer_step(optimizer, model.loss(items), config, step, max_grad_norm=1.0)
        paces.append(tracker.metrics(model)["effective_pace"])
    assert paces[1] > 4 * paces[0]


def test_nan_loss_raises(agreement: TaskData) -> None:
    optimizer = build_optimizer(small_model(agreement), train_config())
    with pytest.raises(NonFiniteError, match="step 0"):
        optimizer_step(optimizer, torch.tensor(torch.nan), train_config(), step=0, max_grad_norm=1.0)


def test_published_squad_run(squad_file: Path, tmp_path: Path) -> None:
    config = PaceStudyConfig(
        "squad", str(squad_file), as_published=True, seeds=1, dim=24, n_layers=1, measured=3
    )
    recipe = config.resolve_recipe()
    data = prepare_task_data("squad", config.source, recipe, DataLimits(as_published=True))
    file = save_task_data(data, tmp_path)
    for run in plan_runs(config, recipe, file, data.mean_length, 3):
        folder = tmp_path / "runs" / run.id
        folder.mkdir(parents=True)
        result = train_and_measure(folder, PaceRunConfig.from_dict(json.loads(json.dumps(run.config))))
        assert result.mass is not None
        assert 0 <= result.mass <= 1
        assert result.faithfulness["gradient"]["texts"] == 3
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == 6
        saved = json.loads((folder / "result.json").read_text())
        assert saved["status"] == "finished"
        assert RunResult.from_dict(saved) == result
