"""The config of a model: plain data, read from YAML and stored with every checkpoint."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from qkflow.attention.init import InitScheme
from qkflow.config_io import Count, Positive, Range, check_ranges, dataclass_from_dict
from qkflow.errors import InputError, unknown
from qkflow.models.slow_path.config import SlowPathConfig

FeedForwardKind = Literal["swiglu", "gelu"]


# Beyond any model: a typo must not build layers for hours or overflow the size of a tensor.
VocabSize = Annotated[int, Range(1, 10**8)]
Layers = Annotated[int, Range(1, 10**4)]
Dim = Annotated[int, Range(1, 10**6)]
Heads = Annotated[int, Range(1, 10**5)]
HiddenDim = Annotated[int, Range(1, 10**7)]


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
    window: Count | None = None  # sliding window in tokens
    dropout: float = 0.0  # of the attention weights


@dataclass(frozen=True)
class ModelConfig:
    """Shape and options of a decoder or encoder."""

    vocab_size: VocabSize  # default: of the tokenizer
    n_layers: Layers  # transformer blocks
    dim: Dim  # of the residual stream
    n_heads: Heads  # query heads
    n_kv_heads: Heads | None = None  # key/value heads (GQA; 1: MQA); default n_heads
    head_dim: Heads | None = None  # default dim / n_heads
    feed_forward: FeedForwardKind = "swiglu"  # default: of the preset
    hidden_dim: HiddenDim | None = None  # of the feed-forward; default 4·dim
    tie_embeddings: bool = True  # share the embedding with the output matrix
    embedding_norm: bool = False  # RMSNorm right behind the embedding
    logit_softcap: Positive | None = None  # cap the logits smoothly: cap·tanh(logits/cap)
    norm_eps: Positive = 1e-6  # of RMSNorm
    attention: AttentionConfig = field(default_factory=AttentionConfig)  # options of every layer's attention
    init: str = "gpt2"  # see qkflow inits
    slow: SlowPathConfig | None = None  # options of a slow path; null: none
    causal: bool = True  # false: an encoder

    def __post_init__(self) -> None:
        if self.feed_forward not in get_args(FeedForwardKind):
            raise unknown("feed-forward", self.feed_forward, get_args(FeedForwardKind))
        check_ranges(self, "model")
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
