"""A classifier of the qkflow architecture in the explorer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qkflow.data.tokenizer import Tokenizer
from qkflow.explore.capture import Capture, ForwardPass
from qkflow.explore.classifier import TransformersClassifier
from qkflow.explore.decoder_model import DecoderModel
from qkflow.measures.attention import capture_attention_inputs
from qkflow.measures.attribution import Classifier


class DecoderClassifierModel(DecoderModel):
    """`QKFlowForSequenceClassification`: a decoder whose last token is read by a linear head."""

    def __init__(self, name: str, model: Any, tokenizer: Tokenizer) -> None:
        super().__init__(name, model.model.decoder, tokenizer)
        self.model = model.eval()
        self.predicts_tokens = False
        names = model.config.id2label
        self.class_names = [str(names[index]) for index in range(model.config.num_labels)]

    def forward(self, ids: Tensor, off: frozenset[tuple[int, int]]) -> ForwardPass:
        run = super().forward(ids, off)
        assert run.final is not None
        run.logits = self.model.score(run.final[-1])
        return run

    def lens_logits(self, capture: Capture, position: int) -> list[tuple[str, Tensor]]:
        return []

    def classifier(self) -> Classifier:
        return TransformersClassifier(self.model, self._attentions)

    def _attentions(self, ids: Tensor) -> list[Tensor]:
        with capture_attention_inputs(self.decoder.blocks) as inputs:
            self.decoder.forward(ids[None])
        return [layer.reference(x)[1] for layer, x in inputs.items()]
