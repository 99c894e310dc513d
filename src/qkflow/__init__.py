"""qkflow: the dynamics of attention."""

from qkflow.attention import Attention, KVCache, merge
from qkflow.errors import InputError

__version__ = "0.1.0"
__all__ = ["Attention", "InputError", "KVCache", "__version__", "merge"]
