"""What the explorer shows of one text: tokens, quantized attention weights, measures, losses.

Weights are stored as 8-bit levels, one byte per weight: A ≈ max·(level/255)² for the largest weight `max` of
the head. The square root, because the first rows have few keys and therefore much larger weights. Scorings
with negative weights use signed levels: A ≈ sign·max·(level/127)².
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qkflow.measures.attention import entropy_and_sink_mass
from qkflow.measures.induction import induction_score, previous_token_score

PARTIAL_LABEL = "⋯"  # of a token that is not a whole character
MEASURES = ("entropy", "sink_mass", "induction", "previous_token")


@dataclass
class ForwardPass:
    """One forward pass over token ids (T,).

    weights   attention weights (H, T, T), one tensor per layer, computed when they are read
    hidden    residual stream (T, dim) before the first and after every layer
    inputs    input (T, dim) of every attention layer, where the model is ours
    final     hidden states (T, dim) that the output head reads
    logits    class logits (n_classes,) of a classifier
    """

    weights: Iterator[Tensor]
    hidden: list[Tensor]
    final: Tensor | None = None
    inputs: list[Tensor] = field(default_factory=list)
    logits: Tensor | None = None


@dataclass
class Capture:
    """The view of one text. `measures` have a value per layer and head, None where undefined."""

    tokens: list[str]
    ids: list[int]
    levels: list[Tensor]  # (H, T, T) per layer, uint8 or int8
    largest: list[list[float]]
    signed: bool
    measures: dict[str, list[list[float | None]]]
    hidden: list[Tensor]
    final: Tensor | None
    inputs: list[Tensor]
    off: frozenset[tuple[int, int]] = frozenset()
    losses: list[float] | None = None  # of tokens 1, 2, … given those before, in nats
    classes: list[float] | None = None  # class probabilities of a classifier
    projections: list[tuple[Tensor, Tensor]] | None = None  # q and k of every layer, once they are read

    @property
    def loss(self) -> float | None:
        return sum(self.losses) / len(self.losses) if self.losses else None

    def weights(self, layer: int) -> Tensor:
        """Return the dequantized weights (H, T, T) of a layer."""
        levels = self.levels[layer].float()
        scale = torch.tensor(self.largest[layer])[:, None, None]
        return scale * (levels / (127 if self.signed else 255)).square() * levels.sign()


def quantize(weights: Tensor, *, signed: bool) -> tuple[Tensor, list[float]]:
    """Return the levels of weights (H, T, T) and the largest absolute weight of every head."""
    size = weights.abs()
    largest = size.amax(dim=(1, 2))
    size.div_(largest.clamp_min(1e-12)[:, None, None]).sqrt_()
    if signed:
        return size.mul_(127).round_().mul_(weights.sign()).to(torch.int8).cpu(), largest.tolist()
    return size.mul_(255).round_().to(torch.uint8).cpu(), largest.tolist()


def measure_heads(weights: Tensor, ids: Tensor) -> dict[str, list[float | None]]:
    """Return every measure of weights (H, T, T), a value per head."""
    entropy, sink = entropy_and_sink_mass(weights)
    values = (entropy, sink, induction_score(weights, ids), previous_token_score(weights))
    return {name: finite(value.tolist()) for name, value in zip(MEASURES, values, strict=True)}


def collect_layers(
    layers: Iterable[Tensor], ids: Tensor, *, signed: bool
) -> tuple[list[Tensor], list[list[float]], dict[str, list[list[float | None]]]]:
    """Quantize and measure one layer after another, so that the weights of one layer are in memory."""
    levels, largest = [], []
    measures: dict[str, list[list[float | None]]] = {name: [] for name in MEASURES}
    for weights in layers:
        weights = weights.float()
        for name, values in measure_heads(weights, ids).items():
            measures[name].append(values)
        layer_levels, layer_largest = quantize(weights, signed=signed)
        levels.append(layer_levels)
        largest.append(layer_largest)
    return levels, largest, measures


def label_tokens(ids: list[int], decode: Callable[[list[int]], str], special: str) -> list[str]:
    """Return a label per token. A character of several tokens is the label of the last of them."""
    labels: list[str] = []
    pending: list[int] = []
    for token in ids:
        pending.append(token)
        text = decode(pending)
        if "\ufffd" in text and len(pending) < 4:
            labels.append(PARTIAL_LABEL)
            continue
        if "\ufffd" in text:  # not the bytes of one character: start again at this token
            text = decode([token])
        labels.append(text or special)
        pending = []
    return labels


def finite(values: list[Any]) -> list[float | None]:
    """Replace NaN and infinity, which JSON does not have, by None."""
    return [value if math.isfinite(value) else None for value in values]
