"""Faithfulness of token attributions: mass on human rationales, comprehensiveness, sufficiency.

For each text, with p the probability of the class ŷ that the model predicts for the full text:

    mass               share of the positive attribution scores on rationale tokens
    confidence (AC)    share of texts with mass above a threshold
    comprehensiveness  p(ŷ | text) − p(ŷ | text without its top tokens)
    sufficiency        p(ŷ | text) − p(ŷ | its top tokens only)

(DeYoung et al. 2020; AC: Vashisht & Ramaswamy 2026). The top tokens are the max(1, ⌈k%·length⌉) with the
highest scores. Deleted tokens are removed, not masked. AOPC is the mean over several k.

`measure_faithfulness` batches the deletions of all texts by length; `measure_faithfulness_reference` is the
definition it is tested against.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qkflow.errors import InputError, unknown
from qkflow.measures.attribution import ATTRIBUTION_METHODS, Classifier, attention_rollout, attribution_scores

PaddedTokens = tuple[NDArray[np.int64], NDArray[np.bool_]]  # ids (T,) and attention mask (T,)


@dataclass(frozen=True)
class Text:
    """One text to explain: token ids and, per annotator, a mask of the rationale tokens."""

    name: str
    ids: Sequence[int]
    rationales: Sequence[Sequence[bool]] = ()

    def __post_init__(self) -> None:
        if not len(self.ids):
            raise InputError(f"text {self.name} has no tokens", code="empty-text")
        for marked in self.rationales:
            if len(marked) != len(self.ids):
                raise InputError(
                    f"text {self.name}: a rationale has {len(marked)} entries for {len(self.ids)} tokens",
                    code="rationale-length-mismatch",
                )


@dataclass(frozen=True)
class FaithfulnessOptions:
    """Conventions of the measures. The defaults follow the definitions above.

    By default the rationale is the majority vote of the annotators, and texts with an empty rationale are
    counted but not averaged. `PUBLISHED_OPTIONS` follows the authors' notebooks: texts padded to 128 with
    padding counted as length, attention of the last (padded) position, mass of the first head of the first
    layer divided by three annotators, a missing rationale counting as zero, rollout without residual.
    """

    pad_to_length: int | None = None
    first_head_last_position: bool = False
    n_annotators: int | None = None  # divisor of the mass; missing rationales count as zero


DEFAULT_OPTIONS = FaithfulnessOptions()
PUBLISHED_OPTIONS = FaithfulnessOptions(pad_to_length=128, first_head_last_position=True, n_annotators=3)


@dataclass
class Faithfulness:
    """Measures of every text, arrays of shape (N,); `mass` is NaN for texts without a rationale."""

    mass: NDArray[np.float64]
    comprehensiveness: dict[float, NDArray[np.float64]]
    sufficiency: dict[float, NDArray[np.float64]]
    threshold: float
    n_emptied: int = 0  # deletions that left no token; p is then 0
    n_without_rationale: int = field(init=False)  # texts left out of mass and confidence

    def __post_init__(self) -> None:
        self.n_without_rationale = int(np.isnan(self.mass).sum())

    @property
    def confidence(self) -> float | None:
        known = self.mass[~np.isnan(self.mass)]
        return float((known > self.threshold).mean()) if len(known) else None

    def summary(self) -> dict[str, Any]:
        """Return means as JSON-serializable values, by k (%), and AOPC over all k."""
        known = self.mass[~np.isnan(self.mass)]
        deleted = {
            name: {f"{k:g}": float(values.mean()) for k, values in measured.items()}
            for name, measured in (
                ("comprehensiveness", self.comprehensiveness),
                ("sufficiency", self.sufficiency),
            )
        }
        return {
            "texts": len(self.mass),
            "without_rationale": self.n_without_rationale,
            "emptied": self.n_emptied,
            "mass": float(known.mean()) if len(known) else None,
            "confidence": self.confidence,
            "threshold": self.threshold,
            **deleted,
            "aopc_comprehensiveness": float(np.mean(list(deleted["comprehensiveness"].values()))),
            "aopc_sufficiency": float(np.mean(list(deleted["sufficiency"].values()))),
        }


def measure_faithfulness(
    model: Classifier,
    texts: Sequence[Text],
    method: str = "rollout",
    ks: Sequence[float] = (5.0,),
    threshold: float = 0.33,
    options: FaithfulnessOptions = DEFAULT_OPTIONS,
    device: str | torch.device = "cpu",
    batch_tokens: int | None = None,
    seed: int = 0,
    on_progress: Callable[[int], None] = lambda texts: None,
) -> Faithfulness:
    """Measure all texts in batches; `ks` are percentages of a text's length."""
    _check_inputs(texts, ks, method)
    if batch_tokens is None:  # on a CPU a batch should fit the cache; a GPU needs large batches
        batch_tokens = 2048 if torch.device(device).type == "cpu" else 65_536
    padded = [_pad_tokens(text, options) for text in texts]
    targets = np.empty(len(texts), dtype=np.int64)
    full_probs = np.empty(len(texts))
    mass = np.empty(len(texts))
    deletions: list[PaddedTokens] = []
    origins: list[tuple[int, float, str]] = []  # text index, k and kind of each deletion
    for members in _batch_by_length([len(ids) for ids, _ in padded], batch_tokens):
        ids, mask = _pad_batch([padded[index] for index in members], device)
        seeds = [(seed, index) for index in members]
        p, predicted, scores, token_mass = _predict_and_attribute(model, method, ids, mask, options, seeds)
        full_probs[members], targets[members] = p.double().cpu().numpy(), predicted.cpu().numpy()
        orders = torch.argsort(scores, dim=-1, descending=True, stable=True).cpu().numpy()
        for row, index in enumerate(members):
            text_ids, text_mask = padded[index]
            mass[index] = _rationale_mass(texts[index], token_mass[row], options)
            for k, kind, kept in _kept_positions(orders[row], len(text_ids), ks):
                origins.append((index, k, kind))
                deletions.append((text_ids[kept], text_mask[kept]))
        on_progress(len(members))
    deletion_targets = targets[[index for index, _, _ in origins]]
    deletion_probs = _target_probabilities(model, deletions, deletion_targets, device, batch_tokens)
    drops = {kind: {k: np.empty(len(texts)) for k in ks} for kind in ("without_top", "top_only")}
    for (index, k, kind), p_deleted in zip(origins, deletion_probs, strict=True):
        drops[kind][k][index] = full_probs[index] - p_deleted
    n_emptied = sum(not kept_mask.any() for _, kept_mask in deletions)
    return Faithfulness(mass, drops["without_top"], drops["top_only"], threshold, n_emptied)


def measure_faithfulness_reference(
    model: Classifier,
    texts: Sequence[Text],
    method: str = "rollout",
    ks: Sequence[float] = (5.0,),
    threshold: float = 0.33,
    options: FaithfulnessOptions = DEFAULT_OPTIONS,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> Faithfulness:
    """Measure one text and one deletion at a time, following the definitions."""
    _check_inputs(texts, ks, method)
    mass: list[float] = []
    drops: dict[str, dict[float, list[float]]] = {
        kind: {k: [] for k in ks} for kind in ("without_top", "top_only")
    }
    n_emptied = 0
    for index, text in enumerate(texts):
        tokens = _pad_tokens(text, options)
        ids, mask = _pad_batch([tokens], device)
        p, predicted, scores, token_mass = _predict_and_attribute(
            model, method, ids, mask, options, [(seed, index)]
        )
        mass.append(_rationale_mass(text, token_mass[0], options))
        order = sorted(range(ids.shape[1]), key=lambda position: (-scores[0, position].item(), position))
        for k in ks:
            top = set(order[: max(1, math.ceil(k / 100 * ids.shape[1]))])
            for kind in ("without_top", "top_only"):
                kept = [i for i in range(ids.shape[1]) if (i in top) == (kind == "top_only")]
                p_deleted = 0.0
                if mask[0, kept].any():
                    with torch.no_grad():
                        p_deleted = model.probabilities(ids[:, kept], mask[:, kept])[0, predicted[0]].item()
                else:
                    n_emptied += 1
                drops[kind][k].append(p.item() - p_deleted)
    arrays = {kind: {k: np.array(values) for k, values in by_k.items()} for kind, by_k in drops.items()}
    return Faithfulness(np.array(mass), arrays["without_top"], arrays["top_only"], threshold, n_emptied)


def _check_inputs(texts: Sequence[Text], ks: Sequence[float], method: str) -> None:
    if method not in ATTRIBUTION_METHODS:
        raise unknown("attribution method", method, ATTRIBUTION_METHODS)
    if not texts:
        raise InputError("there are no texts to measure", code="no-texts")
    if not ks or any(not 0 < k <= 100 for k in ks):
        raise InputError(
            f"k is a percentage of a text's tokens, above 0 and at most 100, not {list(ks)}",
            code="invalid-percentage",
        )


def _pad_tokens(text: Text, options: FaithfulnessOptions) -> PaddedTokens:
    ids = np.asarray(text.ids, dtype=np.int64)
    mask = np.ones(len(ids), dtype=bool)
    if options.pad_to_length is not None:
        ids, mask = ids[: options.pad_to_length], mask[: options.pad_to_length]
        padding = options.pad_to_length - len(ids)
        ids, mask = np.pad(ids, (0, padding)), np.pad(mask, (0, padding))
    return ids, mask


def _predict_and_attribute(
    model: Classifier,
    method: str,
    ids: Tensor,
    attention_mask: Tensor,
    options: FaithfulnessOptions,
    seeds: list[tuple[int, int]],
) -> tuple[Tensor, Tensor, Tensor, NDArray[np.float64]]:
    """Return p(ŷ) (B,), ŷ (B,), attribution scores (B, T) and the mass of each token (B, T)."""
    with torch.no_grad():
        probabilities, layers = model.probabilities_and_attentions(ids, attention_mask)
    p, predicted = probabilities.max(-1)
    if options.first_head_last_position and layers[0].shape[2] != ids.shape[1]:
        raise InputError(
            "the published options use the attention row of the last position: the model must return "
            "(B, H, T, T) weights, not one row",
            code="attention-rows-missing",
        )
    if options.first_head_last_position and method == "rollout":
        scores = attention_rollout(layers, torch.full_like(predicted, ids.shape[1] - 1), residual=0.0)
    else:
        scores = attribution_scores(model, method, ids, attention_mask, layers, predicted, seeds)
    if options.first_head_last_position:
        token_mass = layers[0][:, 0, -1]
    else:
        positive = scores.clamp_min(0)
        token_mass = positive / positive.sum(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)
    return p, predicted, scores, token_mass.double().cpu().numpy()


def _rationale_mass(text: Text, token_mass: NDArray[np.float64], options: FaithfulnessOptions) -> float:
    """Return the mass on the rationale from the mass (T,) of each token; NaN without a rationale."""
    if not text.rationales:
        return math.nan if options.n_annotators is None else 0.0
    marks = np.array([marked[: len(token_mass)] for marked in text.rationales], dtype=bool)
    if options.n_annotators is not None:
        return float((marks * token_mass[: marks.shape[1]]).sum() / options.n_annotators)
    majority = 2 * marks.sum(0) > len(marks)
    return float(token_mass[: len(majority)][majority].sum()) if majority.any() else math.nan


def _kept_positions(
    order: NDArray[np.int64], length: int, ks: Sequence[float]
) -> Iterable[tuple[float, str, NDArray[np.int64]]]:
    """Yield, for every k, the positions without the top tokens and those of the top tokens, in text order."""
    order = order[:length]  # the padding of the batch has score −∞, so it comes last
    for k in ks:
        top = max(1, math.ceil(k / 100 * length))
        yield k, "without_top", np.sort(order[top:])
        yield k, "top_only", np.sort(order[:top])


def _target_probabilities(
    model: Classifier,
    sequences: list[PaddedTokens],
    targets: NDArray[np.int64],
    device: str | torch.device,
    batch_tokens: int,
) -> NDArray[np.float64]:
    """Return p(target) of each sequence; 0 if no token is left."""
    probs = np.zeros(len(sequences))
    nonempty = [index for index, (_, kept_mask) in enumerate(sequences) if kept_mask.any()]
    for members in _batch_by_length([len(sequences[index][0]) for index in nonempty], batch_tokens):
        indices = [nonempty[member] for member in members]
        ids, mask = _pad_batch([sequences[index] for index in indices], device)
        with torch.no_grad():
            batch_probs = model.probabilities(ids, mask).cpu().double().numpy()
        probs[indices] = batch_probs[np.arange(len(indices)), targets[indices]]
    return probs


def _batch_by_length(lengths: Sequence[int], batch_tokens: int) -> Iterable[list[int]]:
    """Yield batches of indices sorted by length, at most `batch_tokens` tokens each, padding included."""
    batch: list[int] = []
    for index in np.argsort(lengths, kind="stable").tolist():
        if batch and (len(batch) + 1) * lengths[index] > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _pad_batch(sequences: Sequence[PaddedTokens], device: str | torch.device) -> tuple[Tensor, Tensor]:
    max_length = max(len(ids) for ids, _ in sequences)
    ids = np.zeros((len(sequences), max_length), dtype=np.int64)
    mask = np.zeros((len(sequences), max_length), dtype=bool)
    for row, (row_ids, row_mask) in enumerate(sequences):
        ids[row, : len(row_ids)], mask[row, : len(row_ids)] = row_ids, row_mask
    return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)
