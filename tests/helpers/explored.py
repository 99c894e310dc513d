"""Small untrained models on disk, and open in the explorer."""

from __future__ import annotations

from pathlib import Path

import torch

from qkflow.data.tokenizer import ByteTokenizer
from qkflow.explore.decoder_model import DecoderModel
from qkflow.models import Decoder, ModelConfig
from qkflow.training import pretrained

TEXT = "the cat saw the cat"


def small_decoder(coupling: str = "none", seed: int = 0, **attention: object) -> Decoder:
    config = ModelConfig.from_dict(
        {
            "vocab_size": 257,
            "n_layers": 2,
            "dim": 32,
            "n_heads": 4,
            "attention": {"coupling": coupling, **attention},
        }
    )
    decoder = Decoder(config, seed=seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(3)  # larger scores: an untrained model attends almost uniformly
    return decoder.eval()


def small_model(coupling: str = "none", name: str = "small", **attention: object) -> DecoderModel:
    return DecoderModel(name, small_decoder(coupling, **attention), ByteTokenizer())


def small_classifier() -> DecoderModel:
    """Return a classifier of the qkflow architecture with two classes."""
    from qkflow import hf
    from qkflow.explore.decoder_classifier import DecoderClassifierModel

    torch.manual_seed(0)
    config = hf.QKFlowConfig(vocab_size=257, n_layers=2, dim=32, n_heads=4, num_labels=2, pad_token_id=256)
    return DecoderClassifierModel("judge", hf.QKFlowForSequenceClassification(config), ByteTokenizer())


def save_small_model(folder: Path, coupling: str = "none", seed: int = 0) -> Path:
    decoder = small_decoder(coupling, seed)
    weights = pretrained.full_state_dict(decoder)
    pretrained.save_model(folder / "model", decoder.config, weights, ByteTokenizer(), seq_len=64)
    return folder
