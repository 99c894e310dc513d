"""The config of a model: plain data, read from YAML and stored with every checkpoint."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from qkflow.attention.init import InitScheme
from qkflow.config_io import dataclass_from_dict
from qkflow.errors import InputError, unknown
from qkflow.models.slow_path.config import SlowPathConfig

FeedForwardKind = Literal["swiglu", "gelu"]


# Beyond any model: a typo must not build layers for hours or overflow the size of a tensor.
_LARGEST = {
    "vocab_size": 10**8,
    "n_layers": 10**4,
    "dim": 10**6,
    "n_heads": 10**5,
    "n_kv_heads": 10**5,
    "head_dim": 10**5,
    "hidden_dim": 10**7,
}


@dataclass(frozen=True)
class AttentionConfig:
    """Options of `Attention`, the same for every layer."""

    coupling: str = "none"  # see qkflow couplings, e.g. leapfrog:n=7
    scoring: str = "softmax"  # see qkflow scorings
    circuit: str = "FAFO"  # factorized (F) or collapsed (C) QK and OV: FAFO, FACO, CAFO or CACO
    bias: bool = False  # biases in the projections
    qk_norm: bool = False  # RMSNorm of queries and keys per head
    qk_norm_gain: float | Literal["learned"] = "learned"  # a number g: no norm weights, scores times g
    rope: bool | dict[str, Any] = True  # rotary positions, or their options (base, scaling, ...)
    window: int | None = None  # sliding window in tokens
    dropout: float = 0.0  # of the attention weights


@dataclass(frozen=True)
class ModelConfig:
    """Shape and options of a decoder or encoder."""

    vocab_size: int  # default: of the tokenizer
    n_layers: int  # transformer blocks
    dim: int  # of the residual stream
    n_heads: int  # query heads
    n_kv_heads: int | None = None  # key/value heads (GQA; 1: MQA); default n_heads
    head_dim: int | None = None  # default dim / n_heads
    feed_forward: FeedForwardKind = "swiglu"  # default: of the preset
    hidden_dim: int | None = None  # of the feed-forward; default 4·dim
    tie_embeddings: bool = True  # share the embedding with the output matrix
    embedding_norm: bool = False  # RMSNorm right behind the embedding
    logit_softcap: float | None = None  # cap the logits smoothly: cap·tanh(logits/cap)
    norm_eps: float = 1e-6  # of RMSNorm
    attention: AttentionConfig = field(default_factory=AttentionConfig)  # options of every layer's attention
    init: str = "gpt2"  # see qkflow inits
    slow: SlowPathConfig | None = None  # options of a slow path; null: none
    causal: bool = True  # false: an encoder

    def __post_init__(self) -> None:
        if self.feed_forward not in get_args(FeedForwardKind):
            raise unknown("feed-forward", self.feed_forward, get_args(FeedForwardKind))
        for name, most in _LARGEST.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise InputError(
                    f"model.{name} must be between 1 and {most}, not {value}", code="bad-model-size"
                )
        if not 0 < self.norm_eps < float("inf"):
            raise InputError(f"model.norm_eps must be above zero, not {self.norm_eps}", code="bad-norm-eps")
        if self.logit_softcap is not None and not 0 < self.logit_softcap < float("inf"):
            raise InputError(
                f"model.logit_softcap must be above zero, not {self.logit_softcap}: null for no cap",
                code="bad-logit-softcap",
            )
        InitScheme.parse(self.init)  # raises for an unknown init
        if self.slow is not None:
            if not self.causal:
                raise InputError(
                    "a slow path needs a causal model: use causal: true", code="slow-path-not-causal"
                )
            self.slow.injection_layers(self.n_layers)  # raises for an index that is not a layer

    @property
    def resolved_hidden_dim(self) -> int:
        return self.hidden_dim or 4 * self.dim

    def slow_path_config(self) -> ModelConfig:
        """Return the config of the slow blocks: like the fast ones, except for their number and attention."""
        assert self.slow is not None
        attention = {
            **dataclasses.asdict(self.attention),
            "window": None,
            "dropout": 0.0,
            **self.slow.attention,
        }
        return dataclasses.replace(
            self,
            n_layers=self.slow.n_layers,
            attention=dataclass_from_dict(AttentionConfig, attention, "model.slow.attention"),
            slow=None,
        )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """Build from plain data; an unknown key raises an error with the closest known one."""
        values = dict(values)
        attention = values.pop("attention", {}) or {}
        if not isinstance(attention, AttentionConfig):
            attention = dataclass_from_dict(AttentionConfig, attention, "model.attention")
        slow = values.pop("slow", None)
        if slow is not None and not isinstance(slow, SlowPathConfig):
            slow = dataclass_from_dict(SlowPathConfig, slow, "model.slow")
        return dataclass_from_dict(cls, {**values, "attention": attention, "slow": slow}, "model")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
