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
from qkflow.measures.circuits import CircuitWatch, circuit_measures
from qkflow.measures.faithfulness import DEFAULT, PUBLISHED, Faithfulness, Rules, Text, measure
from qkflow.studies.pace.dataset import Item, TaskData, load
from qkflow.studies.pace.optimizers import build_optimizer, descend
from qkflow.studies.pace.recipes import Recipe
from qkflow.studies.pace.squad_f1 import f1
from qkflow.studies.pace.task_model import Reader, build_reader, padded
from qkflow.training import environment

SOURCES = ("attention", "rollout", "gradient", "random")
LOOKS = 10  # at the test texts while training
LOOKED_AT = 200
EDGES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
BATCHES_SORTED = 32  # batches whose texts are sorted by length together


def train_and_measure(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Everything between a run's config.yaml and its result.json."""
    data = load(folder.parent.parent / config["data"]["file"])
    recipe = Recipe(**{**config["recipe"], "confounds": Recipe().confounds})
    train = config["train"]
    reader = build_reader(recipe, data, train["seed"])
    began = time.perf_counter()
    with open(folder / "metrics.jsonl", "w") as log:  # a run is short: stopped, it begins anew
        _train(reader, data, recipe, train, config["data"]["length"], log)
    trained = time.perf_counter()
    result = {
        "status": "finished",
        "error": None,
        **measured(reader, data, recipe, config["measure"]),
        "steps": train["steps"],
        "parameters": sum(parameter.numel() for parameter in reader.parameters()),
        "seconds": trained - began,
        "measure_seconds": time.perf_counter() - trained,
        "environment": environment.describe(torch.device("cpu")),
    }
    write_json(folder / "result.json", result)
    return result


def _train(
    reader: Reader, data: TaskData, recipe: Recipe, train: dict[str, Any], length: int, log: Any
) -> None:
    optimizer, watch = build_optimizer(reader, train), CircuitWatch(reader)
    steps, batch = int(train["steps"]), int(train["batch"])
    look_every = max(1, steps // LOOKS)
    looked_at = [item for item in data.test if item.marked][:LOOKED_AT] or data.test[:LOOKED_AT]
    lap, losses = time.perf_counter(), []
    for step, items in zip(range(steps), batches(data.train, batch, train["seed"]), strict=False):
        loss = reader.loss(items)
        descend(optimizer, loss, train["lr"], step, steps, recipe.clip)
        losses.append(float(loss.detach()))
        done = step + 1
        row: dict[str, Any] = {"step": done, "tokens": done * batch * length}
        if done % look_every == 0 or done == steps:
            now = time.perf_counter()
            pace = len(losses) * batch * length / max(now - lap, 1e-9)
            mean = float(np.mean(losses))
            _write(log, {"kind": "train", **row, "loss": mean, "tokens_per_second": pace})
            _write(log, {"kind": "eval", **row, **glance(reader, looked_at), **watch.look(reader)})
            lap, losses = time.perf_counter(), []


def _write(log: Any, row: dict[str, Any]) -> None:
    log.write(json.dumps(row) + "\n")
    log.flush()


def batches(items: Sequence[Item], batch: int, seed: int) -> Iterator[list[Item]]:
    """Batches of texts of similar length, for ever; every text once an epoch, in an order of the seed's."""
    random = np.random.default_rng(seed)
    while True:
        order = random.permutation(len(items))
        cut: list[np.ndarray] = []
        for start in range(0, len(order), batch * BATCHES_SORTED):
            part = order[start : start + batch * BATCHES_SORTED]
            part = part[np.argsort([len(items[index].ids) for index in part], kind="stable")]
            cut += [part[first : first + batch] for first in range(0, len(part), batch)]
        for index in random.permutation(len(cut)):
            yield [items[member] for member in cut[index]]


@torch.no_grad()
def glance(reader: Reader, items: Sequence[Item]) -> dict[str, float | None]:
    """A quick look at a few test texts: accuracy, p(truth), mass; and the circuits' scale."""
    right, truth, mass = [], [], []
    for start in range(0, len(items), 50):
        some = items[start : start + 50]
        ids, mask = padded([item.ids for item in some])
        probabilities, layers = reader.attend(ids, mask)
        targets = torch.tensor([target(item) for item in some])
        truth += probabilities.gather(1, targets[:, None])[:, 0].tolist()
        right += (probabilities.argmax(-1) == targets).tolist()
        rows = torch.stack([layer.mean(1)[torch.arange(len(some)), reader.read(mask)] for layer in layers])
        for item, row in zip(some, rows.mean(0).numpy(), strict=True):
            if item.marked:
                votes = np.array(item.rationales).sum(0)
                mass.append(float(row[: len(votes)][2 * votes > len(item.rationales)].sum()))
    scales = circuit_measures(reader)
    return {
        "accuracy": float(np.mean(right)),
        "truth": float(np.mean(truth)),
        "mass": float(np.mean(mass)) if mass else None,
        "qk_scale": float(np.mean(scales["qk_scale"])),
        "ov_scale": float(np.mean(scales["ov_scale"])),
    }


def target(item: Item) -> int:
    """The class, or the first token of the answer."""
    return item.answer[0] if item.answer else item.label


def measured(reader: Reader, data: TaskData, recipe: Recipe, how: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a finished run, all on test texts."""
    reader.eval()
    chosen = data.test if how["published"] else ([item for item in data.test if item.marked] or data.test)
    chosen = chosen[: recipe.measured]
    rules = _rules(recipe, data, how["published"], chosen)
    texts = [Text(item.name, item.ids, item.rationales) for item in chosen]
    found: dict[str, Faithfulness] = {
        source: measure(reader, texts, source, recipe.ks, recipe.threshold, rules) for source in SOURCES
    }
    summaries = {source: each.summary() for source, each in found.items()}
    known = bool(any(item.marked for item in chosen))
    scales = circuit_measures(reader)
    return {
        **performance(reader, data),
        "mass": summaries["attention"]["mass"] if known else None,
        "confidence": summaries["attention"]["confidence"] if known else None,
        "without_rationale": sum(not item.marked for item in chosen),
        "measured": len(chosen),
        "faithfulness": summaries,
        "heatmap": heatmap(found["attention"].mass, truths(reader, chosen)) if known else None,
        **{name: float(np.mean(values)) for name, values in scales.items()},
    }


def _rules(recipe: Recipe, data: TaskData, published: bool, chosen: Sequence[Item]) -> Rules:
    if not published:
        return DEFAULT
    # missing rationales count as zero among annotators who were asked; where nobody was, there is no mass
    asked = data.annotators if any(item.marked for item in chosen) else None
    return dataclasses.replace(PUBLISHED, padded_to=recipe.longest, annotators=asked)


@torch.no_grad()
def performance(reader: Reader, data: TaskData) -> dict[str, float]:
    """Loss and accuracy on all test texts; for answers F1 of what is written, and how often the first
    token is right."""
    losses, right, written = [], [], []
    for start in range(0, len(data.test), 50):
        some = data.test[start : start + 50]
        losses += [float(reader.loss(some))] * len(some)
        ids, mask = padded([item.ids for item in some])
        guesses = reader.logits(ids, mask).argmax(-1).tolist()
        right += [guess == target(item) for guess, item in zip(guesses, some, strict=True)]
        if reader.head is None:
            for item, answer in zip(some, reader.write(some, data.end), strict=True):
                written.append(f1("".join(data.pieces[token] for token in answer), item.truth))
    accuracy = float(np.mean(right))
    result = {"loss": float(np.mean(losses)), "accuracy": accuracy, "performance": accuracy}
    return result | ({"performance": float(np.mean(written))} if written else {})


@torch.no_grad()
def truths(reader: Reader, items: Sequence[Item]) -> np.ndarray:
    """p(truth) of every text."""
    found: list[float] = []
    for start in range(0, len(items), 50):
        some = items[start : start + 50]
        ids, mask = padded([item.ids for item in some])
        targets = torch.tensor([target(item) for item in some])
        found += reader.probabilities(ids, mask).gather(1, targets[:, None])[:, 0].tolist()
    return np.array(found)


def heatmap(mass: np.ndarray, truth: np.ndarray) -> list[list[float]]:
    """Share (%) of texts by attention mass on the rationale (rows) and p(truth) (columns)."""
    known = ~np.isnan(mass)
    inside = np.clip(mass[known], 0, 1), np.clip(truth[known], 0, 1)
    counts, _, _ = np.histogram2d(*inside, bins=(EDGES, EDGES))
    shares: list[list[float]] = (100 * counts / max(1, known.sum())).tolist()
    return shares
