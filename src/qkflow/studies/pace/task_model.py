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
from qkflow.measures.attention import capture_attention_inputs
from qkflow.models import Decoder, ModelConfig
from qkflow.models.loss import linear_cross_entropy
from qkflow.studies.pace.dataset import EncodedExample, TaskData
from qkflow.studies.pace.recipes import Recipe

MAX_NEW_TOKENS = 16  # tokens written before giving up


class TaskModel(nn.Module):
    """A decoder, and a class (`classes` > 0) or a next token read at the last real token of each text."""

    roles: ClassVar[dict[str, str]] = {"head": "head"}

    def __init__(self, config: ModelConfig, n_classes: int, seed: int = 0) -> None:
        super().__init__()
        self.decoder = Decoder(config, seed=seed)
        self.head = nn.Linear(config.dim, n_classes) if n_classes else None
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

    def readout_positions(self, attention_mask: Tensor) -> Tensor:
        return (
            attention_mask.long() * torch.arange(attention_mask.shape[1], device=attention_mask.device)
        ).argmax(-1)

    def embed(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self.decoder.embedding(ids)
        return embedded

    def logits_from_embeddings(self, inputs_embeds: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.decoder.forward_embeddings(inputs_embeds, attention_mask=attention_mask)
        seen = hidden[torch.arange(len(hidden), device=hidden.device), self.readout_positions(attention_mask)]
        scores: Tensor = self.decoder.logits(seen) if self.head is None else self.head(seen)
        return scores

    def logits(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.logits_from_embeddings(self.embed(ids), attention_mask)

    def probabilities_from_embeddings(self, inputs_embeds: Tensor, attention_mask: Tensor) -> Tensor:
        return self.logits_from_embeddings(inputs_embeds, attention_mask).softmax(-1)

    def probabilities(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.logits(ids, attention_mask).softmax(-1)

    def probabilities_and_attentions(
        self, ids: Tensor, attention_mask: Tensor
    ) -> tuple[Tensor, Sequence[Tensor]]:
        with capture_attention_inputs(self.decoder.blocks) as inputs:
            probabilities = self.probabilities(ids, attention_mask)
        return probabilities, [
            layer.reference(x, attention_mask=attention_mask)[1] for layer, x in inputs.items()
        ]

    def loss(self, examples: Sequence[EncodedExample], device: torch.device | str = "cpu") -> Tensor:
        """Mean cross-entropy of the classes, or of all tokens of the answers."""
        if self.head is not None:
            ids, mask = pad_batch([item.ids for item in examples], device)
            labels = torch.tensor([item.label for item in examples], device=device)
            return nn.functional.cross_entropy(self.logits(ids, mask), labels)
        ids, mask = pad_batch([item.ids + item.answer_ids[:-1] for item in examples], device)
        hidden = self.decoder(ids, attention_mask=mask)
        rows, places = answer_positions(examples)
        targets = torch.tensor([token for item in examples for token in item.answer_ids], device=device)
        return linear_cross_entropy(hidden[rows, places], self.decoder.output_weight, targets)

    @torch.no_grad()
    def generate_answers(
        self, examples: Sequence[EncodedExample], eos_token_id: int, device: torch.device | str = "cpu"
    ) -> list[list[int]]:
        """The answers it gives: the likeliest token after the likeliest, up to the end."""
        written: list[list[int]] = [[] for _ in examples]
        going = list(range(len(examples)))
        for _ in range(MAX_NEW_TOKENS):
            ids, mask = pad_batch([examples[place].ids + written[place] for place in going], device)
            tokens = self.logits(ids, mask).argmax(-1).tolist()
            for place, token in zip(going, tokens, strict=True):
                written[place].append(token)
            going = [place for place, token in zip(going, tokens, strict=True) if token != eos_token_id]
            if not going:
                break
        return [
            answer[: answer.index(eos_token_id)] if eos_token_id in answer else answer for answer in written
        ]


def answer_positions(examples: Sequence[EncodedExample]) -> tuple[list[int], list[int]]:
    """Rows and positions whose next token belongs to an answer."""
    rows = [row for row, item in enumerate(examples) for _ in item.answer_ids]
    places = [len(item.ids) - 1 + step for item in examples for step in range(len(item.answer_ids))]
    return rows, places


def build_task_model(recipe: Recipe, data: TaskData, seed: int) -> TaskModel:
    config = ModelConfig(
        vocab_size=data.vocab_size,
        n_layers=recipe.n_layers,
        dim=recipe.dim,
        n_heads=recipe.n_heads,
        head_dim=recipe.head_dim,
        hidden_dim=recipe.hidden_dim,
        feed_forward="gelu",
    )
    return TaskModel(config, len(data.classes), seed)


def pad_batch(
    sequences: Sequence[Sequence[int]], device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Ids (B, T) and which of them are real; padding stands at the end."""
    longest = max(map(len, sequences))
    ids = torch.tensor([[*each, *[0] * (longest - len(each))] for each in sequences], device=device)
    lengths = torch.tensor([len(each) for each in sequences], device=device)
    return ids, torch.arange(longest, device=device) < lengths[:, None]
