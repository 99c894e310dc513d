"""Attention in five parts: project → couple → rotate → score → write."""

from qkflow.attention.cache import KVCache
from qkflow.attention.mixer import Attention, merge
from qkflow.attention.rotary import Rotary
from qkflow.attention.starts import Start, initialise

__all__ = ["Attention", "KVCache", "Rotary", "Start", "initialise", "merge"]
