"""Text into tokens: corpora by name, tokenizers, a cache of prepared sets, windows to train and test on."""

from qkflow.data.pipeline import prepare, verify
from qkflow.data.token_set import TokenSet
from qkflow.data.windows import EvalWindows, TrainWindows, document_ids

__all__ = ["EvalWindows", "TokenSet", "TrainWindows", "document_ids", "prepare", "verify"]
