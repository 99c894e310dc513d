"""What a model is made of, as plain data: read from YAML, stored with every checkpoint."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from qkflow.config_io import read
from qkflow.errors import InputError, unknown
from qkflow.models.slow_path.config import SlowConfig

FeedForward = Literal["swiglu", "gelu"]


@dataclass(frozen=True)
class AttentionConfig:
    """Options every layer's `Attention` is built with."""

    coupling: str = "none"
    scoring: str = "softmax"
    circuit: str = "FAFO"
    bias: bool = False
    qk_norm: bool = False
    rope: bool | dict[str, Any] = True
    window: int | None = None
    dropout: float = 0.0


@dataclass(frozen=True)
class ModelConfig:
    vocabulary: int
    layers: int
    width: int
    heads: int
    kv_heads: int | None = None
    head_size: int | None = None
    feed_forward: FeedForward = "swiglu"
    hidden: int | None = None  # of the feed-forward; default 4·width
    tied: bool = True
    norm_eps: float = 1e-6
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    start: str = "gpt2"
    slow: SlowConfig | None = None  # a second path at a slower rate

    def __post_init__(self) -> None:
        if self.feed_forward not in get_args(FeedForward):
            raise unknown("feed-forward", self.feed_forward, get_args(FeedForward))
        for name in ("vocabulary", "layers", "width", "heads", "kv_heads", "head_size", "hidden"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"model.{name} must be at least 1, not {value}")
        if not 0 < self.norm_eps < float("inf"):
            raise InputError(f"model.norm_eps must be a number above zero, not {self.norm_eps}")
        if self.slow is not None:
            self.slow.injections(self.layers)  # refuses gates without a layer

    @property
    def hidden_size(self) -> int:
        return self.hidden or 4 * self.width

    def of_slow_path(self) -> ModelConfig:
        """What the slow blocks are built from: as the fast ones, but for their number and attention."""
        assert self.slow is not None
        attention = {
            **dataclasses.asdict(self.attention),
            "window": None,
            "dropout": 0.0,
            **self.slow.attention,
        }
        return dataclasses.replace(
            self,
            layers=self.slow.layers,
            attention=read(AttentionConfig, attention, "model.slow.attention"),
            slow=None,
        )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """Build from plain data; an unknown key is an error that names the nearest known one."""
        values = dict(values)
        attention = values.pop("attention", {}) or {}
        if not isinstance(attention, AttentionConfig):
            attention = read(AttentionConfig, attention, "model.attention")
        slow = values.pop("slow", None)
        if slow is not None and not isinstance(slow, SlowConfig):
            slow = read(SlowConfig, slow, "model.slow")
        return read(cls, {**values, "attention": attention, "slow": slow}, "model")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
