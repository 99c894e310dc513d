"""Named model sizes. The published ones are fitted to the parameter counts of arXiv 2604.01683.

The feed-forward is a confound across sizes: these counts fit SwiGLU at 60m, 150m and 455m, and GELU at 350m.
The SwiGLU twins of `tiny` and `350m` have the same parameter count, for comparisons that hold it fixed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qkflow.errors import unknown
from qkflow.models.config import ModelConfig


@dataclass(frozen=True)
class Preset:
    """Shape of a named model size."""

    n_layers: int
    dim: int
    n_heads: int
    feed_forward: str
    vocab_size: int  # default without a tokenizer
    description: str
    hidden_dim: int | None = None  # of the feed-forward; default 4·dim


PRESETS: dict[str, Preset] = {
    "tiny": Preset(4, 128, 4, "gelu", 2_048, "1.05M, GELU: minutes on a laptop"),
    "tiny-swiglu": Preset(4, 128, 4, "swiglu", 2_048, "1.05M: tiny with SwiGLU, same count", 341),
    "small": Preset(8, 256, 8, "swiglu", 8_192, "10.5M, SwiGLU: an hour on a laptop"),
    "60m": Preset(8, 512, 8, "swiglu", 50_257, "59.3M: the paper's smallest; its count fits SwiGLU"),
    "150m": Preset(12, 768, 12, "swiglu", 50_257, "151.9M: the published count fits SwiGLU"),
    "350m": Preset(24, 1024, 16, "gelu", 50_257, "353.5M: the published count fits GELU"),
    "350m-swiglu": Preset(24, 1024, 16, "swiglu", 50_257, "353.5M: 350m with SwiGLU, same count", 2_731),
    "455m": Preset(24, 1024, 16, "swiglu", 50_257, "454.2M: the published count fits SwiGLU"),
}


def preset(name: str, /, **overrides: Any) -> ModelConfig:
    """Return the config of a named size with overrides, e.g. `preset("tiny", vocab_size=512)`."""
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    size = PRESETS[name]
    base = {
        "n_layers": size.n_layers,
        "dim": size.dim,
        "n_heads": size.n_heads,
        "feed_forward": size.feed_forward,
        "hidden_dim": size.hidden_dim,
        "vocab_size": size.vocab_size,
    }
    return ModelConfig.from_dict({**base, **overrides})
