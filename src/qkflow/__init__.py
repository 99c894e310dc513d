"""qkflow: the dynamics of attention.

from qkflow import Attention
y = Attention(512, n_heads=8, coupling="leapfrog:n=7")(x)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qkflow.attention import Attention, KVCache, merge
    from qkflow.errors import InputError

__version__ = "0.1.0"
__all__ = ["Attention", "InputError", "KVCache", "__version__", "merge"]


def __getattr__(name: str) -> Any:
    """Import the public classes on first access, so that `qkflow --help` does not import torch."""
    if name == "InputError":
        from qkflow.errors import InputError

        return InputError
    if name in __all__:
        from qkflow import attention

        return getattr(attention, name)
    if name == "hub":
        raise ImportError("qkflow.hub was renamed: write from qkflow import hf")
    raise AttributeError(f"module 'qkflow' has no attribute '{name}'")
