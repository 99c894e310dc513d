"""Classifiers of `transformers` in the interface of `qkflow.measures.attribution`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qkflow.measures.attribution import EmbeddingClassifier


class TransformersClassifier(EmbeddingClassifier):
    """A sequence classification model, one text at a time.

    attentions    returns the weights (1, H, T, T) of each layer for token ids (T,)
    """

    def __init__(self, model: Any, attentions: Callable[[Tensor], list[Tensor]]) -> None:
        self.model, self.attentions = model, attentions
        self._causal: bool | None = None

    def probabilities(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids, attention_mask=attention_mask.long()).logits
        return logits.float().softmax(-1)

    def probabilities_and_attentions(
        self, ids: Tensor, attention_mask: Tensor
    ) -> tuple[Tensor, Sequence[Tensor]]:
        attentions = self.attentions(ids[0])
        self._causal = ids.shape[1] > 1 and not bool(attentions[0].triu(1).any())
        return self.probabilities(ids, attention_mask), attentions

    def readout_positions(self, attention_mask: Tensor) -> Tensor:
        """Return the last token of a causal model, the first ([CLS]) of an encoder."""
        last = attention_mask.long().sum(-1) - 1
        return last if self._causal else torch.zeros_like(last)

    def embed(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self.model.get_input_embeddings()(ids)
        return embedded

    def probabilities_from_embeddings(self, inputs_embeds: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.model(inputs_embeds=inputs_embeds, attention_mask=attention_mask.long()).logits
        return logits.float().softmax(-1)
