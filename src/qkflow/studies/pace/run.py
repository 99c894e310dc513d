"""One run of a study: train a reader, watch it, then measure it on the test texts."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qkflow.files import write_json
from qkflow.measures.circuits import CircuitTracker, circuit_metrics
from qkflow.measures.faithfulness import (
    DEFAULT_OPTIONS,
    PUBLISHED_OPTIONS,
    Faithfulness,
    FaithfulnessOptions,
    Text,
    measure_faithfulness,
)
from qkflow.studies.pace.dataset import EncodedExample, TaskData, load_task_data
from qkflow.studies.pace.optimizers import build_optimizer, optimizer_step
from qkflow.studies.pace.recipes import Recipe
from qkflow.studies.pace.squad_f1 import squad_f1
from qkflow.studies.pace.task_model import TaskModel, build_task_model, pad_batch
from qkflow.system import collect_env

ATTRIBUTION_METHODS = ("attention", "rollout", "gradient", "random")
N_QUICK_EVALS = 10  # at the test texts while training
QUICK_EVAL_EXAMPLES = 200
BIN_EDGES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
LENGTH_BUCKET_BATCHES = 32  # batches whose texts are sorted by length together


def train_and_measure(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Everything between a run's config.yaml and its result.json."""
    data = load_task_data(folder.parent.parent / config["data"]["file"])
    recipe = Recipe(**{**config["recipe"], "confounds": Recipe().confounds})
    train = config["train"]
    reader = build_task_model(recipe, data, train["seed"])
    began = time.perf_counter()
    with open(folder / "metrics.jsonl", "w") as log:  # a run is short: stopped, it begins anew
        _train(reader, data, recipe, train, config["data"]["seq_len"], log)
    trained = time.perf_counter()
    result = {
        "status": "finished",
        "error": None,
        **evaluate(reader, data, recipe, config["measure"]),
        "steps": train["steps"],
        "parameters": sum(parameter.numel() for parameter in reader.parameters()),
        "seconds": trained - began,
        "measure_seconds": time.perf_counter() - trained,
        "environment": collect_env(),
    }
    write_json(folder / "result.json", result)
    return result


def _train(
    model: TaskModel, data: TaskData, recipe: Recipe, train_config: dict[str, Any], mean_length: int, log: Any
) -> None:
    optimizer, watch = build_optimizer(model, train_config), CircuitTracker(model)
    steps, batch = int(train_config["steps"]), int(train_config["batch_size"])
    look_every = max(1, steps // N_QUICK_EVALS)
    looked_at = [item for item in data.test if item.has_rationale][:QUICK_EVAL_EXAMPLES] or data.test[
        :QUICK_EVAL_EXAMPLES
    ]
    lap, losses = time.perf_counter(), []
    for step, items in zip(range(steps), iter_batches(data.train, batch, train_config["seed"]), strict=False):
        loss = model.loss(items)
        optimizer_step(optimizer, loss, train_config["lr"], step, steps, recipe.clip)
        losses.append(float(loss.detach()))
        done = step + 1
        row: dict[str, Any] = {"step": done, "tokens": done * batch * mean_length}
        if done % look_every == 0 or done == steps:
            now = time.perf_counter()
            pace = len(losses) * batch * mean_length / max(now - lap, 1e-9)
            mean = float(np.mean(losses))
            _write_metrics(log, {"kind": "train", **row, "loss": mean, "tokens_per_second": pace})
            _write_metrics(
                log, {"kind": "eval", **row, **quick_eval(model, looked_at), **watch.metrics(model)}
            )
            lap, losses = time.perf_counter(), []


def _write_metrics(log: Any, row: dict[str, Any]) -> None:
    log.write(json.dumps(row) + "\n")
    log.flush()


def iter_batches(examples: Sequence[EncodedExample], batch: int, seed: int) -> Iterator[list[EncodedExample]]:
    """Batches of texts of similar length, for ever; every text once an epoch, in an order of the seed's."""
    random = np.random.default_rng(seed)
    while True:
        order = random.permutation(len(examples))
        cut: list[np.ndarray] = []
        for start in range(0, len(order), batch * LENGTH_BUCKET_BATCHES):
            part = order[start : start + batch * LENGTH_BUCKET_BATCHES]
            part = part[np.argsort([len(examples[index].ids) for index in part], kind="stable")]
            cut += [part[first : first + batch] for first in range(0, len(part), batch)]
        for index in random.permutation(len(cut)):
            yield [examples[member] for member in cut[index]]


@torch.no_grad()
def quick_eval(model: TaskModel, examples: Sequence[EncodedExample]) -> dict[str, float | None]:
    """A quick look at a few test texts: accuracy, p(truth), mass; and the circuits' scale."""
    right, truth, mass = [], [], []
    for start in range(0, len(examples), 50):
        some = examples[start : start + 50]
        ids, mask = pad_batch([item.ids for item in some])
        probabilities, layers = model.probabilities_and_attentions(ids, mask)
        targets = torch.tensor([target_id(item) for item in some])
        truth += probabilities.gather(1, targets[:, None])[:, 0].tolist()
        right += (probabilities.argmax(-1) == targets).tolist()
        rows = torch.stack(
            [layer.mean(1)[torch.arange(len(some)), model.readout_positions(mask)] for layer in layers]
        )
        for item, row in zip(some, rows.mean(0).numpy(), strict=True):
            if item.has_rationale:
                votes = np.array(item.rationales).sum(0)
                mass.append(float(row[: len(votes)][2 * votes > len(item.rationales)].sum()))
    scales = circuit_metrics(model)
    return {
        "accuracy": float(np.mean(right)),
        "truth": float(np.mean(truth)),
        "mass": float(np.mean(mass)) if mass else None,
        "qk_scale": float(np.mean(scales["qk_scale"])),
        "ov_scale": float(np.mean(scales["ov_scale"])),
    }


def target_id(example: EncodedExample) -> int:
    """The class, or the first token of the answer."""
    return example.answer_ids[0] if example.answer_ids else example.label


def evaluate(
    model: TaskModel, data: TaskData, recipe: Recipe, measure_config: dict[str, Any]
) -> dict[str, Any]:
    """The numbers of a finished run, all on test texts."""
    model.eval()
    chosen = (
        data.test
        if measure_config["published"]
        else ([item for item in data.test if item.has_rationale] or data.test)
    )
    chosen = chosen[: recipe.measured]
    rules = _faithfulness_options(recipe, data, measure_config["published"], chosen)
    texts = [Text(item.name, item.ids, item.rationales) for item in chosen]
    found: dict[str, Faithfulness] = {
        source: measure_faithfulness(model, texts, source, recipe.ks, recipe.threshold, rules)
        for source in ATTRIBUTION_METHODS
    }
    summaries = {source: each.summary() for source, each in found.items()}
    known = bool(any(item.has_rationale for item in chosen))
    scales = circuit_metrics(model)
    return {
        **performance(model, data),
        "mass": summaries["attention"]["mass"] if known else None,
        "confidence": summaries["attention"]["confidence"] if known else None,
        "without_rationale": sum(not item.has_rationale for item in chosen),
        "measured": len(chosen),
        "faithfulness": summaries,
        "heatmap": heatmap(found["attention"].mass, label_probabilities(model, chosen)) if known else None,
        **{name: float(np.mean(values)) for name, values in scales.items()},
    }


def _faithfulness_options(
    recipe: Recipe, data: TaskData, published: bool, examples: Sequence[EncodedExample]
) -> FaithfulnessOptions:
    if not published:
        return DEFAULT_OPTIONS
    # missing rationales count as zero among annotators who were asked; where nobody was, there is no mass
    asked = data.n_annotators if any(item.has_rationale for item in examples) else None
    return dataclasses.replace(PUBLISHED_OPTIONS, pad_to_length=recipe.max_length, n_annotators=asked)


@torch.no_grad()
def performance(model: TaskModel, data: TaskData) -> dict[str, float]:
    """Loss and accuracy on all test texts; for answers F1 of what is written, and how often the first
    token is right."""
    losses, right, written = [], [], []
    for start in range(0, len(data.test), 50):
        some = data.test[start : start + 50]
        losses += [float(model.loss(some))] * len(some)
        ids, mask = pad_batch([item.ids for item in some])
        guesses = model.logits(ids, mask).argmax(-1).tolist()
        right += [guess == target_id(item) for guess, item in zip(guesses, some, strict=True)]
        if model.head is None:
            for item, answer in zip(some, model.generate_answers(some, data.eos_token_id), strict=True):
                written.append(
                    squad_f1("".join(data.token_texts[token] for token in answer), item.reference_answers)
                )
    accuracy = float(np.mean(right))
    result = {"loss": float(np.mean(losses)), "accuracy": accuracy, "performance": accuracy}
    return result | ({"performance": float(np.mean(written))} if written else {})


@torch.no_grad()
def label_probabilities(model: TaskModel, examples: Sequence[EncodedExample]) -> np.ndarray:
    """p(truth) of every text."""
    found: list[float] = []
    for start in range(0, len(examples), 50):
        some = examples[start : start + 50]
        ids, mask = pad_batch([item.ids for item in some])
        targets = torch.tensor([target_id(item) for item in some])
        found += model.probabilities(ids, mask).gather(1, targets[:, None])[:, 0].tolist()
    return np.array(found)


def heatmap(mass: np.ndarray, label_probs: np.ndarray) -> list[list[float]]:
    """Share (%) of texts by attention mass on the rationale (rows) and p(truth) (columns)."""
    known = ~np.isnan(mass)
    inside = np.clip(mass[known], 0, 1), np.clip(label_probs[known], 0, 1)
    counts, _, _ = np.histogram2d(*inside, bins=(BIN_EDGES, BIN_EDGES))
    shares: list[list[float]] = (100 * counts / max(1, known.sum())).tolist()
    return shares
