"""The options of a slow path, as plain data: `slow: {ratio: 8, layers: 2, …}` in a model's config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from qkflow.errors import InputError, unknown
from qkflow.models.slow_path.gate import Gate
from qkflow.models.slow_path.pooling import check_ratio

OutputInit = Literal["drawn", "zero"]


@dataclass(frozen=True)
class SlowPathConfig:
    """A slow path beside the fast one (Gao, arXiv 2606.16730); what the paper leaves open is an option.

    ratio      P: tokens a block, so that the slow path takes one step in P
    layers     slow transformer blocks
    hidden     of the network φ; default the model's width
    gate       `scalar`, `vector` or `tanh`
    start      where the gate starts; at 0 the model starts as the fast path alone
    inject     `once`: before the first fast layer; `each`: before every one, each with its own gate; or a
               list of layers, numbered from 0
    output     how φ's last matrix starts: `drawn` as every other, or `zero`, which needs a gate that is not
    attention  what differs from the fast path's attention, e.g. `{coupling: euler}`; a window (counted in
               blocks here) and dropout are the slow path's own, off unless given
    """

    ratio: int = 8
    n_layers: int = 2
    hidden_dim: int | None = None
    gate: str = "scalar"
    gate_init: float = 0.0
    inject: str | list[int] = "once"
    output_init: OutputInit = "drawn"
    attention: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        Gate.check(self.gate, self.gate_init)
        for name in ("n_layers", "hidden_dim"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"model.slow.{name} must be at least 1, not {value}")
        if self.output_init not in get_args(OutputInit):
            raise unknown("model.slow.output", self.output_init, get_args(OutputInit))
        if self.output_init == "zero" and self.gate_init == 0:
            raise InputError(
                "a slow path whose gate and output both start at zero can never learn: the gate's gradient "
                "is the output and the output's gradient is the gate, so neither ever moves; set "
                "model.slow.start to another value, e.g. 0.1, or model.slow.output to 'drawn'"
            )

    def injection_layers(self, n_layers: int) -> list[int]:
        """The fast layers, of `layers`, before which the slow path speaks."""
        if isinstance(self.inject, str):
            if self.inject not in ("once", "each"):
                raise unknown("model.slow.inject", self.inject, ("once", "each"))
            return [0] if self.inject == "once" else list(range(n_layers))
        chosen = list(self.inject)
        if len(chosen) > n_layers:
            raise InputError(
                f"model.slow.inject asks for {len(chosen)} gates, but there are {n_layers} fast layers"
            )
        outside = [layer for layer in chosen if not 0 <= layer < n_layers]
        if outside or not chosen or len(set(chosen)) < len(chosen):
            raise InputError(
                f"model.slow.inject must name fast layers from 0 to {n_layers - 1}, each once, not {chosen}"
            )
        return sorted(chosen)
