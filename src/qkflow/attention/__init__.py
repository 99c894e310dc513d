"""Attention in five parts: project → couple → rotate → score → output."""

from qkflow.attention.attention import Attention, merge
from qkflow.attention.init import InitScheme, initialize
from qkflow.attention.kv_cache import KVCache
from qkflow.attention.rope import RotaryEmbedding

__all__ = ["Attention", "InitScheme", "KVCache", "RotaryEmbedding", "initialize", "merge"]
