"""Task model: a small transformer that predicts a class or generates an answer.

The transformer is `qkflow.models.Decoder` with a padding mask; a classifier is an encoder (`causal=False`).
The model implements the `EmbeddingClassifier` protocol of `qkflow.measures.attribution`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from qkflow.measures.attention import capture_attention_inputs
from qkflow.models import Decoder, ModelConfig
from qkflow.studies.pace.dataset import EncodedExample, TaskData
from qkflow.studies.pace.recipes import Recipe
from qkflow.training.pretrained import load_model

MAX_NEW_TOKENS = 16  # per generated answer


class TaskModel(nn.Module):
    """Transformer read out at the last token of each example: class logits, or next-token logits.

    With `n_classes` > 0 a linear head predicts the class; the config should have `causal=False`, unless the
    transformer is a pretrained `decoder`. With `n_classes` = 0 the model is a causal language model that
    generates the answer.
    """

    roles: ClassVar[dict[str, str]] = {"head": "head"}

    def __init__(
        self, config: ModelConfig, n_classes: int, seed: int = 0, *, decoder: Decoder | None = None
    ) -> None:
        super().__init__()
        self.decoder = Decoder(config, seed=seed) if decoder is None else decoder
        self.head = nn.Linear(config.dim, n_classes) if n_classes else None
        if self.head is not None:
            generator = torch.Generator().manual_seed(seed)
            nn.init.normal_(self.head.weight, std=0.02, generator=generator)
            nn.init.zeros_(self.head.bias)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.decoder.blocks

    def readout_positions(self, attention_mask: Tensor) -> Tensor:
        """Return the position (B,) of the last real token."""
        positions = torch.arange(attention_mask.shape[1], device=attention_mask.device)
        return (attention_mask.long() * positions).argmax(-1)

    def embed(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self.decoder.embedding(ids)
        return embedded

    def logits_from_embeddings(self, inputs_embeds: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.decoder.forward_embeddings(inputs_embeds, attention_mask=attention_mask)
        rows = torch.arange(len(hidden), device=hidden.device)
        readout = hidden[rows, self.readout_positions(attention_mask)]
        logits: Tensor = self.decoder.logits(readout) if self.head is None else self.head(readout)
        return logits

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
        """Return the mean cross-entropy of the classes, or of all answer tokens."""
        if self.head is not None:
            ids, mask = pad_batch([example.ids for example in examples], device)
            labels = torch.tensor([example.label for example in examples], device=device)
            return nn.functional.cross_entropy(self.logits(ids, mask), labels)
        ids, mask = pad_batch([example.ids + example.answer_ids[:-1] for example in examples], device)
        hidden = self.decoder(ids, attention_mask=mask)
        rows, positions = answer_positions(examples)
        targets = torch.tensor([token for example in examples for token in example.answer_ids], device=device)
        return self.decoder.loss(hidden[rows, positions], targets)

    @torch.no_grad()
    def generate_answers(
        self, examples: Sequence[EncodedExample], eos_token_id: int, device: torch.device | str = "cpu"
    ) -> list[list[int]]:
        """Generate answers greedily, up to the end-of-sequence token (not included)."""
        answers: list[list[int]] = [[] for _ in examples]
        unfinished = list(range(len(examples)))
        for _ in range(MAX_NEW_TOKENS):
            ids, mask = pad_batch([examples[i].ids + answers[i] for i in unfinished], device)
            tokens = dict(zip(unfinished, self.logits(ids, mask).argmax(-1).tolist(), strict=True))
            unfinished = [i for i in unfinished if tokens[i] != eos_token_id]
            for i in unfinished:
                answers[i].append(tokens[i])
            if not unfinished:
                break
        return answers


def answer_positions(examples: Sequence[EncodedExample]) -> tuple[list[int], list[int]]:
    """Return the rows and positions whose next token belongs to an answer."""
    rows = [row for row, example in enumerate(examples) for _ in example.answer_ids]
    positions = [
        len(example.ids) - 1 + offset for example in examples for offset in range(len(example.answer_ids))
    ]
    return rows, positions


def build_task_model(
    recipe: Recipe, data: TaskData, seed: int, pretrained: str | Path | None = None
) -> TaskModel:
    """Build the model of a run; with `pretrained`, from the weights of that model folder."""
    if pretrained is not None:
        decoder, _ = load_model(pretrained)
        return TaskModel(decoder.config, len(data.classes), seed, decoder=decoder.train())
    config = ModelConfig(
        vocab_size=data.vocab_size,
        n_layers=recipe.n_layers,
        dim=recipe.dim,
        n_heads=recipe.n_heads,
        head_dim=recipe.head_dim,
        hidden_dim=recipe.hidden_dim,
        feed_forward="gelu",
        causal=recipe.generates_answer,
    )
    return TaskModel(config, len(data.classes), seed)


def pad_batch(
    sequences: Sequence[Sequence[int]], device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Return token ids (B, T), padded at the end, and the attention mask (B, T), True at real tokens."""
    longest = max(map(len, sequences))
    ids = torch.tensor([[*each, *[0] * (longest - len(each))] for each in sequences], device=device)
    lengths = torch.tensor([len(each) for each in sequences], device=device)
    return ids, torch.arange(longest, device=device) < lengths[:, None]
