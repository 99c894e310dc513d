"""Evaluation of a task model on test examples: performance, attention on rationales, faithfulness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from qkflow.measures.circuits import circuit_metrics
from qkflow.measures.faithfulness import (
    DEFAULT_OPTIONS,
    PUBLISHED_OPTIONS,
    FaithfulnessOptions,
    Text,
    measure_faithfulness,
)
from qkflow.measures.heatmap import attention_heatmap
from qkflow.studies.pace.dataset import EncodedExample, TaskData
from qkflow.studies.pace.recipes import Recipe
from qkflow.studies.pace.results import ATTRIBUTION_METHODS
from qkflow.studies.pace.squad_f1 import squad_f1
from qkflow.studies.pace.task_model import TaskModel, pad_batch

EVAL_BATCH_SIZE = 50


def target_id(example: EncodedExample) -> int:
    """Return the class, or the first token of the answer."""
    return example.answer_ids[0] if example.answer_ids else example.label


def _eval_batches(examples: Sequence[EncodedExample]) -> Iterator[Sequence[EncodedExample]]:
    for start in range(0, len(examples), EVAL_BATCH_SIZE):
        yield examples[start : start + EVAL_BATCH_SIZE]


@torch.no_grad()
def quick_eval(model: TaskModel, examples: Sequence[EncodedExample]) -> dict[str, float | None]:
    """Evaluate during training: accuracy, probability of the true label, attention mass, circuit scales."""
    correct, truth, mass = [], [], []
    for batch in _eval_batches(examples):
        ids, mask = pad_batch([example.ids for example in batch])
        probabilities, layers = model.probabilities_and_attentions(ids, mask)
        targets = torch.tensor([target_id(example) for example in batch])
        truth += probabilities.gather(1, targets[:, None])[:, 0].tolist()
        correct += (probabilities.argmax(-1) == targets).tolist()
        readout = torch.arange(len(batch)), model.readout_positions(mask)
        attention = torch.stack([layer.mean(1)[readout] for layer in layers]).mean(0).numpy()
        for example, weights in zip(batch, attention, strict=True):
            if example.has_rationale:
                votes = np.array(example.rationales).sum(0)
                majority = 2 * votes > len(example.rationales)
                mass.append(float(weights[: len(votes)][majority].sum()))
    scales = circuit_metrics(model)
    return {
        "accuracy": float(np.mean(correct)),
        "truth": float(np.mean(truth)),
        "mass": float(np.mean(mass)) if mass else None,
        "qk_scale": float(np.mean(scales["qk_scale"])),
        "ov_scale": float(np.mean(scales["ov_scale"])),
    }


def evaluate(model: TaskModel, data: TaskData, recipe: Recipe, as_published: bool) -> dict[str, Any]:
    """Return the measured fields of `RunResult`."""
    model.eval()
    with_rationale = [example for example in data.test if example.has_rationale]
    examples = (data.test if as_published else with_rationale or data.test)[: recipe.measured]
    has_rationales = any(example.has_rationale for example in examples)
    options = DEFAULT_OPTIONS
    if as_published:
        options = _published_options(recipe, data.n_annotators if has_rationales else None)
    texts = [Text(example.name, example.ids, example.rationales) for example in examples]
    faithfulness = {
        method: measure_faithfulness(model, texts, method, recipe.ks, recipe.threshold, options)
        for method in ATTRIBUTION_METHODS
    }
    summaries = {method: measured.summary() for method, measured in faithfulness.items()}
    label_probs = label_probabilities(model, examples) if has_rationales else None
    return {
        **performance(model, data),
        "mass": summaries["attention"]["mass"] if has_rationales else None,
        "confidence": summaries["attention"]["confidence"] if has_rationales else None,
        "without_rationale": sum(not example.has_rationale for example in examples),
        "measured": len(examples),
        "faithfulness": summaries,
        "heatmap": None
        if label_probs is None
        else attention_heatmap(faithfulness["attention"].mass, label_probs).tolist(),
        "circuits": {name: float(np.mean(values)) for name, values in circuit_metrics(model).items()},
    }


def _published_options(recipe: Recipe, n_annotators: int | None) -> FaithfulnessOptions:
    """Return the published options. A missing rationale counts as zero, unless the task has none at all."""
    return replace(PUBLISHED_OPTIONS, pad_to_length=recipe.max_length, n_annotators=n_annotators)


@torch.no_grad()
def predict(
    model: TaskModel, examples: Sequence[EncodedExample], device: torch.device | str = "cpu"
) -> list[int]:
    """Return the predicted class of every example, or the first token of its answer."""
    predictions: list[int] = []
    for batch in _eval_batches(examples):
        ids, mask = pad_batch([example.ids for example in batch], device)
        predictions += model.logits(ids, mask).argmax(-1).tolist()
    return predictions


@torch.no_grad()
def performance(model: TaskModel, data: TaskData) -> dict[str, float]:
    """Return loss, accuracy and performance on all test examples.

    Performance is accuracy, or the F1 of generated answers, whose accuracy is that of the first token.
    """
    losses, correct, f1 = [], [], []
    for batch in _eval_batches(data.test):
        losses += [float(model.loss(batch))] * len(batch)
        predictions = predict(model, batch)
        correct += [p == target_id(example) for p, example in zip(predictions, batch, strict=True)]
        if model.head is None:
            answers = model.generate_answers(batch, data.eos_token_id)
            for example, answer in zip(batch, answers, strict=True):
                text = "".join(data.token_texts[token] for token in answer)
                f1.append(squad_f1(text, example.reference_answers))
    accuracy = float(np.mean(correct))
    score = float(np.mean(f1)) if f1 else accuracy
    return {"loss": float(np.mean(losses)), "accuracy": accuracy, "performance": score}


@torch.no_grad()
def label_probabilities(model: TaskModel, examples: Sequence[EncodedExample]) -> np.ndarray:
    """Return the probability of the true label of every example."""
    probabilities: list[float] = []
    for batch in _eval_batches(examples):
        ids, mask = pad_batch([example.ids for example in batch])
        targets = torch.tensor([target_id(example) for example in batch])
        probabilities += model.probabilities(ids, mask).gather(1, targets[:, None])[:, 0].tolist()
    return np.array(probabilities)
