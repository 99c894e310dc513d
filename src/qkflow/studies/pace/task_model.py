"""A small model of ours that puts a text into a class, or answers it, where its last token is read.

The transformer is `qkflow.models.Decoder` with a padding mask; an encoder is the same with attention that
sees both ways. What the faithfulness measures ask of a model (`rankings.Classifier`) is all here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from qkflow.attention import Attention
from qkflow.measures.attention import captured
from qkflow.models import Decoder, ModelConfig
from qkflow.models.loss import cross_entropy
from qkflow.studies.pace.dataset import Item, TaskData
from qkflow.studies.pace.recipes import Recipe

LONGEST_ANSWER = 16  # tokens written before giving up


class Reader(nn.Module):
    """A decoder, and a class (`classes` > 0) or a next token read at the last real token of each text."""

    roles: ClassVar[dict[str, str]] = {"head": "head"}

    def __init__(self, config: ModelConfig, classes: int, seed: int = 0) -> None:
        super().__init__()
        self.decoder = Decoder(config, seed=seed)
        self.head = nn.Linear(config.width, classes) if classes else None
        if self.head is not None:  # an encoder: every token sees every other
            for module in self.decoder.modules():
                if isinstance(module, Attention):
                    module.causal = False
            generator = torch.Generator().manual_seed(seed)
            nn.init.normal_(self.head.weight, std=0.02, generator=generator)
            nn.init.zeros_(self.head.bias)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.decoder.blocks

    def read(self, mask: Tensor) -> Tensor:
        return (mask.long() * torch.arange(mask.shape[1], device=mask.device)).argmax(-1)

    def embed(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self.decoder.embedding(ids)
        return embedded

    def logits_of(self, embedded: Tensor, mask: Tensor) -> Tensor:
        hidden = self.decoder.from_embeddings(embedded, padding=mask)
        seen = hidden[torch.arange(len(hidden), device=hidden.device), self.read(mask)]
        scores: Tensor = self.decoder.logits(seen) if self.head is None else self.head(seen)
        return scores

    def logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.logits_of(self.embed(ids), mask)

    def probabilities_of(self, embedded: Tensor, mask: Tensor) -> Tensor:
        return self.logits_of(embedded, mask).softmax(-1)

    def probabilities(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.logits(ids, mask).softmax(-1)

    def attend(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        with captured(self.decoder.blocks) as inputs:
            probabilities = self.probabilities(ids, mask)
        return probabilities, [layer.reference(x, padding=mask)[1] for layer, x in inputs.items()]

    def loss(self, items: Sequence[Item], device: torch.device | str = "cpu") -> Tensor:
        """Mean cross-entropy of the classes, or of all tokens of the answers."""
        if self.head is not None:
            ids, mask = padded([item.ids for item in items], device)
            labels = torch.tensor([item.label for item in items], device=device)
            return nn.functional.cross_entropy(self.logits(ids, mask), labels)
        ids, mask = padded([item.ids + item.answer[:-1] for item in items], device)
        hidden = self.decoder(ids, padding=mask)
        rows, places = answer_places(items)
        targets = torch.tensor([token for item in items for token in item.answer], device=device)
        return cross_entropy(hidden[rows, places], self.decoder.output_weight, targets)

    @torch.no_grad()
    def write(self, items: Sequence[Item], end: int, device: torch.device | str = "cpu") -> list[list[int]]:
        """The answers it gives: the likeliest token after the likeliest, up to the end."""
        written: list[list[int]] = [[] for _ in items]
        going = list(range(len(items)))
        for _ in range(LONGEST_ANSWER):
            ids, mask = padded([items[place].ids + written[place] for place in going], device)
            tokens = self.logits(ids, mask).argmax(-1).tolist()
            for place, token in zip(going, tokens, strict=True):
                written[place].append(token)
            going = [place for place, token in zip(going, tokens, strict=True) if token != end]
            if not going:
                break
        return [answer[: answer.index(end)] if end in answer else answer for answer in written]


def answer_places(items: Sequence[Item]) -> tuple[list[int], list[int]]:
    """Rows and positions whose next token belongs to an answer."""
    rows = [row for row, item in enumerate(items) for _ in item.answer]
    places = [len(item.ids) - 1 + step for item in items for step in range(len(item.answer))]
    return rows, places


def build_reader(recipe: Recipe, data: TaskData, seed: int) -> Reader:
    config = ModelConfig(
        vocabulary=data.vocabulary,
        layers=recipe.layers,
        width=recipe.width,
        heads=recipe.heads,
        head_size=recipe.head_size,
        hidden=recipe.hidden,
        feed_forward="gelu",
    )
    return Reader(config, len(data.classes), seed)


def padded(sequences: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Ids (B, T) and which of them are real; padding stands at the end."""
    longest = max(map(len, sequences))
    ids = torch.tensor([[*each, *[0] * (longest - len(each))] for each in sequences], device=device)
    lengths = torch.tensor([len(each) for each in sequences], device=device)
    return ids, torch.arange(longest, device=device) < lengths[:, None]
