"""The interface of a model that the explorer opens: one class for ours, one for `transformers`."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qkflow.attention.couplings.base import Coupling
from qkflow.config_io import check_utf8
from qkflow.errors import InputError
from qkflow.explore.capture import Capture, ForwardPass, collect_layers, finite, label_tokens
from qkflow.measures.attribution import Classifier
from qkflow.measures.induction import induction_score, previous_token_score

MAX_WEIGHTS = 160_000_000  # of all heads together: one byte each, on the server and in the page
LOSS_ROWS = 256  # logits of this many tokens at a time
TOP_TOKENS = 6
SPECIAL_LABEL = "[end]"


@dataclass
class Trajectory:
    """q and k (steps + 1, T, D) of one head: before the coupling, and after each of its steps."""

    q: Tensor
    k: Tensor


class ExplorableModel(ABC):
    """A model whose attention can be captured, with heads switched off on demand."""

    name: str
    kind: str
    n_heads: list[int]  # per layer
    vocab_size: int
    position_limit: int | None = None
    class_names: list[str] | None = None
    predicts_tokens: bool = True
    signed: bool = False  # weights may be negative
    device: torch.device
    special_label: str = SPECIAL_LABEL

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text as the model reads it, special tokens included."""

    @abstractmethod
    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids."""

    @abstractmethod
    def forward(self, ids: Tensor, off: frozenset[tuple[int, int]]) -> ForwardPass:
        """Run token ids (T,). The output of the heads `off` = {(layer, head)} is zero before projection."""

    @abstractmethod
    def lens_logits(self, capture: Capture, position: int) -> list[tuple[str, Tensor]]:
        """Return (name, logits (V,)) of one position: of the embedding, of every layer, last the model's."""

    @abstractmethod
    def trajectory(self, capture: Capture, layer: int, head: int) -> Trajectory:
        """Return queries and keys of a head before and after each step of its coupling."""

    @abstractmethod
    def coupling(self, layer: int) -> Coupling | None:
        """Return the coupling of a layer, None if it has none."""

    @abstractmethod
    def output_logits(self, final: Tensor) -> Tensor:
        """Return logits (T, V) of what the output head reads."""

    def special_tokens(self, ids: list[int]) -> list[bool]:
        """Return which tokens are not part of the text: here the first, which precedes a document."""
        return [index == 0 for index in range(len(ids))]

    def classifier(self) -> Classifier:
        """Return the classifier for attributions."""
        raise InputError(f"{self.name} is not a classifier", code="not-a-classifier")

    @property
    def n_layers(self) -> int:
        return len(self.n_heads)

    @property
    def max_tokens(self) -> int:
        by_size = int((MAX_WEIGHTS / max(1, sum(self.n_heads))) ** 0.5)
        return by_size if self.position_limit is None else min(by_size, self.position_limit)

    def encode_checked(self, text: str) -> list[int]:
        """Return token ids; raise if there are none, or more than can be shown."""
        check_utf8("the text", text)
        ids = self.encode(text)
        if not text.strip() or len(ids) < 2:
            raise InputError("type a text of at least two tokens", code="empty-text")
        if len(ids) > self.max_tokens:
            raise InputError(
                f"the text has {len(ids)} tokens, {self.name} shows at most {self.max_tokens}: cut it",
                code="text-too-long",
            )
        return ids

    def check_heads(self, heads: frozenset[tuple[int, int]]) -> None:
        for layer, head in sorted(heads):
            if not (0 <= layer < self.n_layers and 0 <= head < self.n_heads[layer]):
                raise InputError(
                    f"{self.name} has no head {head} in layer {layer}: it has {self.n_layers} layers",
                    code="unknown-head",
                )

    @torch.no_grad()
    def capture(self, text: str, off: frozenset[tuple[int, int]] = frozenset()) -> Capture:
        """Return the view of a text with the heads `off` switched off."""
        self.check_heads(off)
        return self.capture_ids(self.encode_checked(text), off)

    @torch.no_grad()
    def capture_ids(self, ids: list[int], off: frozenset[tuple[int, int]] = frozenset()) -> Capture:
        tokens = torch.tensor(ids, device=self.device)
        run = self.forward(tokens, off)
        levels, largest, measures = collect_layers(run.weights, tokens, signed=self.signed)
        return Capture(
            tokens=label_tokens(ids, self.decode, self.special_label),
            ids=ids,
            levels=levels,
            largest=largest,
            signed=self.signed,
            measures=measures | self._diagnostics(),
            hidden=run.hidden,
            final=run.final,
            inputs=run.inputs,
            off=off,
            losses=self._token_losses(run.final, tokens) if self.predicts_tokens else None,
            classes=None if run.logits is None else run.logits.softmax(-1).tolist(),
        )

    def _token_losses(self, final: Tensor | None, ids: Tensor) -> list[float]:
        assert final is not None
        losses: list[float] = []
        for begin in range(0, len(ids) - 1, LOSS_ROWS):
            targets = ids[begin + 1 : begin + 1 + LOSS_ROWS]
            logits = self.output_logits(final[begin : begin + len(targets)]).float()
            losses += F.cross_entropy(logits, targets, reduction="none").tolist()
        return losses

    def _diagnostics(self) -> dict[str, list[list[float | None]]]:
        """Return the diagnostics of the couplings, such as the step size, of every layer and head."""
        by_name: dict[str, list[list[float | None]]] = {}
        for layer, n_heads in enumerate(self.n_heads):
            coupling = self.coupling(layer)
            for name, values in ({} if coupling is None else coupling.diagnostics()).items():
                rows = by_name.setdefault(name, [[None] * count for count in self.n_heads])
                per_head = len(values) // n_heads  # differential scoring has two query heads per head
                rows[layer] = finite(values[:: max(1, per_head)].tolist()[:n_heads])
        return by_name

    @cached_property
    def random_scores(self) -> dict[str, list[list[float]]]:
        """Induction and previous-token score of every head on random words that are repeated.

        Words, because most byte tokens of a small tokenizer have never been trained.
        """
        ids = torch.tensor(self.encode(self.random_text(0))[: self.max_tokens], device=self.device)
        scores: dict[str, list[list[float]]] = {"induction": [], "previous_token": []}
        with torch.no_grad():
            for weights in self.forward(ids, frozenset()).weights:
                scores["induction"].append(induction_score(weights.float(), ids).tolist())
                scores["previous_token"].append(previous_token_score(weights.float()).tolist())
        return scores

    @torch.no_grad()
    def predictions(self, capture: Capture, position: int) -> list[dict[str, Any]]:
        """Return the logit lens of a position: the most probable tokens by layer, and the next token's."""
        if not 0 <= position < len(capture.ids):
            raise InputError(
                f"there is no token {position}: the text has {len(capture.ids)}", code="unknown-token"
            )
        actual = capture.ids[position + 1] if position + 1 < len(capture.ids) else None
        rows = []
        for name, logits in self.lens_logits(capture, position):
            probabilities = logits.float().softmax(-1)
            top = probabilities.topk(min(TOP_TOKENS, len(probabilities)))
            pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            row: dict[str, Any] = {
                "layer": name,
                "top": [[self.decode([token]) or self.special_label, p] for token, p in pairs],
            }
            if actual is not None:
                row["actual"] = float(probabilities[actual])
                row["rank"] = int((probabilities > probabilities[actual]).sum()) + 1
            rows.append(row)
        return rows

    def random_text(self, seed: int, words: int = 24) -> str:
        """Return random words and the same words again: a text that shows induction heads."""
        generator = random.Random(seed)
        sample = generator.sample(range(self.vocab_size), min(self.vocab_size, 4096))
        tokens = {self.decode([token]).strip() for token in sample}
        for shortest in (3, 2):  # a small vocabulary may have short words only
            candidates = [word for word in sorted(tokens) if _is_word(word, shortest)]
            if len(candidates) >= words // 2:
                chosen = generator.sample(candidates, min(words, len(candidates)))
                return " ".join([*chosen, *chosen])
        half = "".join(generator.sample("abcdefghijklmnopqrstuvwxyz", min(words, 26)))  # a byte tokenizer
        return half + half


def _is_word(text: str, shortest: int) -> bool:
    return text.isascii() and text.isalpha() and shortest <= len(text) <= 8
