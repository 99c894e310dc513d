"""One fine-tuning run: a trained model with a linear head is trained on a task and scored."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qkflow.attention.init import InitScheme, ParamSampler
from qkflow.files import check_file_name, write_json
from qkflow.models import Decoder
from qkflow.studies.finetune.config import FinetuneRunConfig, FinetuneTrainConfig
from qkflow.studies.finetune.metrics import score
from qkflow.studies.pace.dataset import EncodedExample, TaskData, load_task_data
from qkflow.studies.pace.evaluation import predict
from qkflow.studies.pace.run import epoch_batches, optimizer_step
from qkflow.studies.pace.task_model import TaskModel
from qkflow.system import collect_env, resolve_device
from qkflow.training.metrics_log import MetricsLog
from qkflow.training.optimizer import AdamW, parameter_groups
from qkflow.training.pretrained import load_model
from qkflow.training.run_dir import RESULT_FILE
from qkflow.training.step import NonFiniteError

MAX_GRAD_NORM = 1.0
N_LOG_ROWS = 20  # per run
HEAD_STREAM = "finetune"  # name of the random stream of the head


def finetune_and_score(folder: Path, config: FinetuneRunConfig) -> dict[str, Any]:
    """Fine-tune and score the run of a folder, from its config to its result.json."""
    data = load_task_data(folder.parent.parent, config.data_file)
    device = resolve_device(config.train.device)
    decoder, _ = load_model(folder.parent / check_file_name("pretrained", config.pretrained), device=device)
    model = build_classifier(decoder, len(data.classes), config.train.seed).to(device)
    start = time.perf_counter()
    log = MetricsLog(folder, resume_step=0)  # a run is short: interrupted, it is trained again from step 0
    try:
        _train(model, data.train, config, device, log)
    finally:
        log.close()
    trained = time.perf_counter()
    metrics = config.task.metrics
    labels = [example.label for example in data.test]
    scores = score(metrics, labels, predict(model.eval(), data.test, device))
    result = {
        "status": "finished",
        "error": None,
        "task": str(config.task),
        "metric": metrics[0],
        "score": scores[metrics[0]],
        "metrics": scores,
        "majority": score(metrics, labels, [majority_class(data)] * len(labels)),
        "train_examples": len(data.train),
        "validation_examples": len(data.test),
        "truncated": data.issue_counts.get("examples truncated", 0),
        "steps": config.train.steps,
        "seconds": trained - start,
        "eval_seconds": time.perf_counter() - trained,
        "environment": collect_env(device),
    }
    write_json(folder / RESULT_FILE, result)
    return result


def build_classifier(decoder: Decoder, n_classes: int, seed: int) -> TaskModel:
    """Add a linear head that reads the hidden state of the last token of each example.

    The model is causal, so only the last token depends on the whole example. The head's weights come from a
    stream of their own: with one seed, all models get the same.
    """
    model = TaskModel(decoder.config, n_classes, decoder=decoder)
    assert model.head is not None
    sampler = ParamSampler(InitScheme.parse("gpt2"), seed, decoder.config.n_layers, HEAD_STREAM)
    sampler.init_linear("head", model.head)
    return model


def majority_class(data: TaskData) -> int:
    """Return the most frequent class of the training examples."""
    return int(np.bincount([example.label for example in data.train]).argmax())


class TaskBatches:
    """Batches of examples of similar length. An epoch contains every example once."""

    def __init__(self, examples: Sequence[EncodedExample], batch_size: int, seed: int) -> None:
        self.examples, self.batch_size, self.seed = examples, batch_size, seed
        self.steps_per_epoch = math.ceil(len(examples) / batch_size)
        self._lengths = [len(example.ids) for example in examples]
        self._epoch = lru_cache(maxsize=1)(self._shuffle)

    def batch(self, step: int) -> list[EncodedExample]:
        """Return the batch of step `step` (from 0): a pure function of seed and step."""
        epoch, position = divmod(step, self.steps_per_epoch)
        return [self.examples[i] for i in self._epoch(epoch)[position]]

    def _shuffle(self, epoch: int) -> list[np.ndarray]:
        return epoch_batches(self._lengths, self.batch_size, np.random.default_rng((self.seed, epoch)))


def _train(
    model: TaskModel,
    examples: Sequence[EncodedExample],
    config: FinetuneRunConfig,
    device: torch.device,
    log: MetricsLog,
) -> None:
    train = config.train
    torch.manual_seed(train.seed)  # dropout
    optimizer = build_optimizer(model.train(), train)
    batches = TaskBatches(examples, train.batch_size, train.seed)
    log_every = max(1, train.steps // N_LOG_ROWS)
    tokens_per_step = train.batch_size * config.seq_len
    losses: list[float] = []
    last = time.perf_counter()
    for step in range(1, train.steps + 1):
        loss = model.loss(batches.batch(step - 1), device)
        optimizer_step(optimizer, loss, train, step - 1, MAX_GRAD_NORM)
        losses.append(float(loss.detach()))
        if step % log_every == 0 or step == train.steps:
            speed = len(losses) * tokens_per_step / max(time.perf_counter() - last, 1e-9)
            row = {"step": step, "tokens": step * tokens_per_step, "loss": float(np.mean(losses))}
            log.write({"kind": "train", **row, "tokens_per_second": speed})
            losses, last = [], time.perf_counter()
    if not all(bool(parameter.isfinite().all()) for parameter in model.parameters()):
        raise NonFiniteError("the weights are not finite after the last step: lower the learning rate")


def build_optimizer(model: TaskModel, config: FinetuneTrainConfig) -> AdamW:
    """Build AdamW over all weights: pretrained ones and the head have the same learning rate."""
    return AdamW(parameter_groups(model, config.lr, config.weight_decay))
