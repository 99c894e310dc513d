"""Attention in five parts: project → couple → rotate → score → write."""

from qkflow.attention.attention import Attention, merge
from qkflow.attention.init import Start, initialise
from qkflow.attention.kv_cache import KVCache
from qkflow.attention.rope import Rotary

__all__ = ["Attention", "KVCache", "Rotary", "Start", "initialise", "merge"]
