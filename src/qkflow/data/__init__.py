"""Text to tokens to batches: corpora by name, tokenizers, a cache of token sets, and windows (batches)."""

from qkflow.data.pipeline import prepare, verify
from qkflow.data.token_set import TokenSet
from qkflow.data.windows import EvalWindows, TrainWindows, document_ids

__all__ = ["EvalWindows", "TokenSet", "TrainWindows", "document_ids", "prepare", "verify"]
