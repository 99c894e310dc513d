"""The `transformers` model that computes what a qkflow decoder computes."""

from __future__ import annotations

from typing import Any

import torch

from qkflow import hf
from qkflow.models import Decoder


def llama(model: Decoder, seq_len: int) -> Any:
    """Return a LlamaForCausalLM with the weights of `model`, after a check that the logits agree."""
    peer = hf.to_llama(model, max_position_embeddings=seq_len)
    ids = torch.randint(model.config.vocab_size, (2, min(16, seq_len)))
    with torch.no_grad():
        torch.testing.assert_close(model.logits(model(ids)), peer(input_ids=ids).logits, rtol=1e-3, atol=1e-4)
    return peer
