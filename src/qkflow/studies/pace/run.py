"""One run of a pace study: train a task model, then measure it on the test examples."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from qkflow.files import write_json
from qkflow.measures.circuits import CircuitTracker
from qkflow.roles import QK_ROLES, freeze_roles, parameter_roles
from qkflow.studies.pace.config import PaceRunConfig, PaceTrainConfig
from qkflow.studies.pace.dataset import EncodedExample, TaskData, load_task_data
from qkflow.studies.pace.evaluation import evaluate, quick_eval
from qkflow.studies.pace.results import RunResult
from qkflow.studies.pace.task_model import TaskModel, build_task_model
from qkflow.system import collect_env
from qkflow.training.metrics_log import MetricsLog
from qkflow.training.optimizer import SGD, AdamW, LRMultiplier, Optimizer, clip_grad_norm, parameter_groups
from qkflow.training.pace import parse_ratio_schedule
from qkflow.training.run_dir import RESULT_FILE
from qkflow.training.schedule import warmup_cosine_factor
from qkflow.training.step import NonFiniteError

SGD_MOMENTUM = 0.99  # of the published setting
WARMUP_FRACTION = 0.1
N_QUICK_EVALS = 10  # per run
QUICK_EVAL_EXAMPLES = 200
LENGTH_BUCKET_BATCHES = 32  # batches whose examples are sorted by length together


def train_and_measure(folder: Path, config: PaceRunConfig) -> RunResult:
    """Train and measure the run of a folder, from its config to its result.json."""
    data = load_task_data(folder.parent.parent, config.data_file)
    model = build_task_model(config.recipe, data, config.train.seed, config.pretrained)
    start = time.perf_counter()
    log = MetricsLog(folder, resume_step=0)  # a run is short: interrupted, it is trained again from step 0
    try:
        _train(model, data, config, log)
    finally:
        log.close()
    trained = time.perf_counter()
    result = RunResult(
        **evaluate(model, data, config.recipe, config.as_published),
        steps=config.train.steps,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        seconds=trained - start,
        measure_seconds=time.perf_counter() - trained,
        environment=collect_env(torch.device("cpu")),
    )
    write_json(folder / RESULT_FILE, result.to_dict())
    return result


def _train(model: TaskModel, data: TaskData, config: PaceRunConfig, log: MetricsLog) -> None:
    train = config.train
    optimizer, tracker = build_optimizer(model, train), CircuitTracker(model)
    eval_every = max(1, train.steps // N_QUICK_EVALS)
    eval_examples = ([x for x in data.test if x.has_rationale] or data.test)[:QUICK_EVAL_EXAMPLES]
    batches = iter_batches(data.train, train.batch_size, train.seed)
    losses: list[float] = []
    last_eval = time.perf_counter()
    for step in range(1, train.steps + 1):
        loss = model.loss(next(batches))
        optimizer_step(optimizer, loss, train, step - 1, config.recipe.clip)
        losses.append(float(loss.detach()))
        if step % eval_every == 0 or step == train.steps:
            tokens_per_step = train.batch_size * config.seq_len
            seconds = max(time.perf_counter() - last_eval, 1e-9)
            row = {"step": step, "tokens": step * tokens_per_step}
            speed = len(losses) * tokens_per_step / seconds
            log.write({"kind": "train", **row, "loss": float(np.mean(losses)), "tokens_per_second": speed})
            log.write({"kind": "eval", **row, **quick_eval(model, eval_examples), **tracker.metrics(model)})
            losses, last_eval = [], time.perf_counter()


def build_optimizer(model: TaskModel, config: PaceTrainConfig) -> Optimizer:
    """Build the optimizer of a run. The learning rate of the query-key roles follows the ratio schedule."""
    schedule = parse_ratio_schedule(config.ratio, config.steps)
    scaled_roles = (*QK_ROLES, "embed") if config.scale_embed_lr else QK_ROLES

    def scaled(progress: float) -> float:
        return config.other_lr_scale * schedule(round(progress * config.steps))

    multipliers: dict[str, LRMultiplier] = {
        role: scaled if role in scaled_roles else config.other_lr_scale
        for role in parameter_roles(model).values()
    }
    if config.freeze:
        freeze_roles(model, config.freeze)
    groups = parameter_groups(model, config.lr, config.weight_decay, multipliers)
    return SGD(groups, momentum=SGD_MOMENTUM) if config.optimizer == "sgd" else AdamW(groups)


class ScheduleConfig(Protocol):
    """What `optimizer_step` needs of a training config."""

    @property
    def steps(self) -> int: ...
    @property
    def lr(self) -> float: ...


def optimizer_step(
    optimizer: Optimizer, loss: Tensor, config: ScheduleConfig, step: int, max_grad_norm: float
) -> None:
    """Take step number `step` (from 0). Raise NonFiniteError if the loss is NaN or infinite."""
    if not math.isfinite(float(loss.detach())):
        raise NonFiniteError(f"the loss is not finite at step {step}: lower the learning rate")
    optimizer.zero_grad()
    loss.backward()
    if max_grad_norm:
        clip_grad_norm(optimizer.gradients(), max_grad_norm)
    warmup_steps = max(1, round(WARMUP_FRACTION * config.steps))
    factor = warmup_cosine_factor(step, config.steps, warmup_steps)
    optimizer.set_lr(config.lr * factor, step / config.steps)
    optimizer.step()


def iter_batches(
    examples: Sequence[EncodedExample], batch_size: int, seed: int
) -> Iterator[list[EncodedExample]]:
    """Yield batches of examples of similar length, without end. An epoch contains every example once."""
    rng = np.random.default_rng(seed)
    while True:
        for batch in epoch_batches([len(example.ids) for example in examples], batch_size, rng):
            yield [examples[i] for i in batch]


def epoch_batches(lengths: Sequence[int], batch_size: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Return the batches of one epoch, in random order, as indices of examples of similar length."""
    bucket_size = batch_size * LENGTH_BUCKET_BATCHES
    order = rng.permutation(len(lengths))
    batches: list[np.ndarray] = []
    for start in range(0, len(order), bucket_size):
        bucket = order[start : start + bucket_size]
        bucket = bucket[np.argsort([lengths[i] for i in bucket], kind="stable")]
        batches += [bucket[first : first + batch_size] for first in range(0, len(bucket), batch_size)]
    return [batches[index] for index in rng.permutation(len(batches))]
