"""Does attention explain the prediction? Mass on human rationales, and what deleting the top tokens does.

For each text, with p the probability of the class ŷ that the model predicts for the whole text:

    mass               share of the ranking's positive scores that falls on the rationale
    confidence (AC)    share of texts whose mass exceeds a threshold
    comprehensiveness  p(ŷ | text) − p(ŷ | text without its top tokens)
    sufficiency        p(ŷ | text) − p(ŷ | its top tokens alone)

(DeYoung et al. 2020; AC: Vashisht & Ramaswamy 2026). The top tokens are the max(1, ⌈k%·length⌉) with the
highest scores; deleted tokens are gone, and the rest closes up. AOPC is the mean over several k.

`measure` deletes for all texts at once, in batches of similar length; `measure_one_by_one` is the definition
it is tested against.
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

PaddedTokens = tuple[NDArray[np.int64], NDArray[np.bool_]]  # ids, and which of them are real


@dataclass(frozen=True)
class Text:
    """One text to explain: token ids and, per annotator, which tokens they marked."""

    name: str
    ids: Sequence[int]
    rationales: Sequence[Sequence[bool]] = ()

    def __post_init__(self) -> None:
        if not len(self.ids):
            raise InputError(f"post {self.name} has no tokens")
        for marked in self.rationales:
            if len(marked) != len(self.ids):
                raise InputError(
                    f"post {self.name}: a rationale covers {len(marked)} tokens, the text has {len(self.ids)}"
                )


@dataclass(frozen=True)
class FaithfulnessOptions:
    """How the measures are taken; the defaults are the definitions above.

    A rationale is what more than half of the annotators marked; texts where that is nothing are counted, not
    averaged. `PUBLISHED` has the rules of the authors' notebooks instead: texts padded to 128 and padding
    counted as length, attention read at the last padded position, mass from the first head of the first
    layer, averaged over three annotators of whom those without a rationale count as zero, rollout without
    residual.
    """

    pad_to_length: int | None = None
    first_head_last_position: bool = False
    n_annotators: int | None = None  # divide by this number, missing rationales counting as zero


DEFAULT_OPTIONS = FaithfulnessOptions()
PUBLISHED_OPTIONS = FaithfulnessOptions(pad_to_length=128, first_head_last_position=True, n_annotators=3)


@dataclass
class Faithfulness:
    """The measures of every text, in order; `mass` is NaN where there is no rationale."""

    mass: NDArray[np.float64]
    comprehensiveness: dict[float, NDArray[np.float64]]
    sufficiency: dict[float, NDArray[np.float64]]
    threshold: float
    n_emptied: int = 0  # deletions that left no token: the class then has probability 0
    n_without_rationale: int = field(init=False)  # texts without a rationale, left out of mass and confidence

    def __post_init__(self) -> None:
        self.n_without_rationale = int(np.isnan(self.mass).sum())

    @property
    def confidence(self) -> float | None:
        known = self.mass[~np.isnan(self.mass)]
        return float((known > self.threshold).mean()) if len(known) else None

    def summary(self) -> dict[str, Any]:
        """Means for a table or JSON; k in %, AOPC over all of them."""
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
    """The measures of all texts, batched; `ks` are percentages of a text's length. See `rankings.SOURCES`."""
    _check_inputs(texts, ks, method)
    if batch_tokens is None:  # a CPU is fastest while a batch fits its cache, a GPU once it is full
        batch_tokens = 2048 if torch.device(device).type == "cpu" else 65_536
    padded = [_pad_tokens(text, options) for text in texts]
    chosen = np.empty(len(texts), dtype=np.int64)
    whole = np.empty(len(texts))
    mass = np.empty(len(texts))
    deletions: list[PaddedTokens] = []
    owners: list[tuple[int, float, str]] = []
    for members in _batch_by_length([len(ids) for ids, _ in padded], batch_tokens):
        ids, mask = _pad_batch([padded[index] for index in members], device)
        seeds = [(seed, index) for index in members]
        p, predicted, ranked, heard = _predict_and_attribute(model, method, ids, mask, options, seeds)
        whole[members], chosen[members] = p.double().cpu().numpy(), predicted.cpu().numpy()
        orders = torch.argsort(ranked, dim=-1, descending=True, stable=True).cpu().numpy()
        for row, index in enumerate(members):
            own, real = padded[index]
            mass[index] = _rationale_mass(texts[index], heard[row], options)
            for k, kind, kept in _kept_positions(orders[row], len(own), ks):
                owners.append((index, k, kind))
                deletions.append((own[kept], real[kept]))
        on_progress(len(members))
    left = _target_probabilities(
        model, deletions, chosen[[index for index, _, _ in owners]], device, batch_tokens
    )
    drops = {kind: {k: np.empty(len(texts)) for k in ks} for kind in ("without", "alone")}
    for (index, k, kind), p_left in zip(owners, left, strict=True):
        drops[kind][k][index] = whole[index] - p_left
    emptied = sum(not real.any() for _, real in deletions)
    return Faithfulness(mass, drops["without"], drops["alone"], threshold, emptied)


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
    """The same measures, a text and a deletion at a time: slow, and as the definitions read."""
    _check_inputs(texts, ks, method)
    mass: list[float] = []
    drops: dict[str, dict[float, list[float]]] = {kind: {k: [] for k in ks} for kind in ("without", "alone")}
    emptied = 0
    for index, text in enumerate(texts):
        tokens = _pad_tokens(text, options)
        ids, mask = _pad_batch([tokens], device)
        p, predicted, ranked, heard = _predict_and_attribute(
            model, method, ids, mask, options, [(seed, index)]
        )
        mass.append(_rationale_mass(text, heard[0], options))
        order = sorted(range(ids.shape[1]), key=lambda place: (-ranked[0, place].item(), place))
        for k in ks:
            top = set(order[: max(1, math.ceil(k / 100 * ids.shape[1]))])
            for kind in ("without", "alone"):
                kept = [place for place in range(ids.shape[1]) if (place in top) == (kind == "alone")]
                p_left = 0.0
                if mask[0, kept].any():
                    with torch.no_grad():
                        p_left = model.probabilities(ids[:, kept], mask[:, kept])[0, predicted[0]].item()
                else:
                    emptied += 1
                drops[kind][k].append(p.item() - p_left)
    arrays = {kind: {k: np.array(values) for k, values in by_k.items()} for kind, by_k in drops.items()}
    return Faithfulness(np.array(mass), arrays["without"], arrays["alone"], threshold, emptied)


def _check_inputs(texts: Sequence[Text], ks: Sequence[float], method: str) -> None:
    if method not in ATTRIBUTION_METHODS:
        raise unknown("ranking", method, ATTRIBUTION_METHODS)
    if not texts:
        raise InputError("there are no texts to measure")
    if not ks or any(not 0 < k <= 100 for k in ks):
        raise InputError(f"k is a percentage of a text's tokens, within 0…100, not {list(ks)}")


def _pad_tokens(text: Text, options: FaithfulnessOptions) -> PaddedTokens:
    ids = np.asarray(text.ids, dtype=np.int64)
    real = np.ones(len(ids), dtype=bool)
    if options.pad_to_length is not None:
        ids, real = ids[: options.pad_to_length], real[: options.pad_to_length]
        missing = options.pad_to_length - len(ids)
        ids, real = np.pad(ids, (0, missing)), np.pad(real, (0, missing))
    return ids, real


def _predict_and_attribute(
    model: Classifier,
    method: str,
    ids: Tensor,
    attention_mask: Tensor,
    options: FaithfulnessOptions,
    seeds: list[tuple[int, int]],
) -> tuple[Tensor, Tensor, Tensor, NDArray[np.float64]]:
    """p and class of each text, what its tokens are ranked by, and what the mass is taken of."""
    with torch.no_grad():
        probabilities, layers = model.probabilities_and_attentions(ids, attention_mask)
    p, predicted = probabilities.max(-1)
    if options.first_head_last_position and layers[0].shape[2] != ids.shape[1]:
        raise InputError("the published rules read attention at the end: the model must give all of its rows")
    if options.first_head_last_position and method == "rollout":
        ranked = attention_rollout(layers, torch.full_like(predicted, ids.shape[1] - 1), residual=0.0)
    else:
        ranked = attribution_scores(model, method, ids, attention_mask, layers, predicted, seeds)
    if options.first_head_last_position:
        heard = layers[0][:, 0, -1]
    else:
        positive = ranked.clamp_min(0)
        heard = positive / positive.sum(-1, keepdim=True).clamp_min(torch.finfo(ranked.dtype).tiny)
    return p, predicted, ranked, heard.double().cpu().numpy()


def _rationale_mass(text: Text, token_mass: NDArray[np.float64], options: FaithfulnessOptions) -> float:
    """The share of a (padded) text's scores on its rationale, NaN if it has none."""
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
    """For every k, the places left without the top tokens and those of the top tokens, in reading order."""
    order = order[:length]  # padding of the batch ranks last
    for k in ks:
        top = max(1, math.ceil(k / 100 * length))
        yield k, "without", np.sort(order[top:])
        yield k, "alone", np.sort(order[:top])


def _target_probabilities(
    model: Classifier,
    sequences: list[PaddedTokens],
    targets: NDArray[np.int64],
    device: str | torch.device,
    batch_tokens: int,
) -> NDArray[np.float64]:
    """p of each sequence's chosen class; 0 where no real token is left."""
    found = np.zeros(len(sequences))
    some = [index for index, (_, real) in enumerate(sequences) if real.any()]
    for members in _batch_by_length([len(sequences[index][0]) for index in some], batch_tokens):
        indices = [some[member] for member in members]
        ids, mask = _pad_batch([sequences[index] for index in indices], device)
        with torch.no_grad():
            picked = model.probabilities(ids, mask).cpu()
        found[indices] = picked.double().numpy()[np.arange(len(indices)), targets[indices]]
    return found


def _batch_by_length(lengths: Sequence[int], batch_tokens: int) -> Iterable[list[int]]:
    """Indices in batches of similar length, at most `batch_tokens` tokens each, padding included."""
    batch: list[int] = []
    for index in np.argsort(lengths, kind="stable").tolist():
        if batch and (len(batch) + 1) * lengths[index] > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _pad_batch(sequences: Sequence[PaddedTokens], device: str | torch.device) -> tuple[Tensor, Tensor]:
    longest = max(len(ids) for ids, _ in sequences)
    ids = np.zeros((len(sequences), longest), dtype=np.int64)
    mask = np.zeros((len(sequences), longest), dtype=bool)
    for row, (own, real) in enumerate(sequences):
        ids[row, : len(own)], mask[row, : len(own)] = own, real
    return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)
