"""Config of the slow path: the section `slow: {ratio: 8, n_layers: 2, …}` of a model config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from qkflow.config_io import Range, check_ranges
from qkflow.errors import InputError, unknown
from qkflow.models.slow_path.gate import Gate
from qkflow.models.slow_path.pooling import check_ratio

OutputInit = Literal["random", "zero"]


@dataclass(frozen=True)
class SlowPathConfig:
    """Options of a slow path (Gao, arXiv 2606.16730), including those the paper leaves open.

    ratio        P, the tokens per block
    n_layers     number of slow transformer blocks
    hidden_dim   hidden size of the feedback MLP φ; default: the model's `dim`
    gate         `scalar`, `vector` or `tanh`
    gate_init    initial g; at 0 the model equals the fast path at init
    pool_after   number of fast layers before the residual stream is pooled; 0: pool the embeddings
    inject       `once`: add ũ before the next fast layer; `each`: before every fast layer from there on, each
                 with its own gate; or a list of layer indices, counted from 0
    output_init  init of φ's last matrix: `random` like every other matrix, or `zero` (needs gate_init ≠ 0)
    attention    overrides of the fast path's attention options, e.g. `{coupling: euler}`; `window` (counted
                 in blocks) and `dropout` are not inherited: they are off unless set here
    """

    ratio: Annotated[int, Range(high=10**9)] = 8
    n_layers: Annotated[int, Range(1, 10**4)] = 2
    hidden_dim: Annotated[int, Range(1, 10**7)] | None = None
    gate: str = "scalar"
    gate_init: float = 0.0
    pool_after: Annotated[int, Range(high=10**4)] = 0
    inject: str | list[int] = "once"
    output_init: OutputInit = "random"
    attention: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        Gate.check(self.gate, self.gate_init)
        check_ranges(self, "model.slow")
        if self.output_init not in get_args(OutputInit):
            raise unknown(
                "model.slow.output_init", self.output_init, get_args(OutputInit), code="unknown-output-init"
            )
        if self.output_init == "zero" and self.gate_init == 0:
            raise InputError(
                "the slow path would never train: with gate_init 0 and output_init 'zero' the gradients of "
                "both are zero; set model.slow.gate_init to a nonzero value such as 0.1, or "
                "model.slow.output_init to 'random'",
                code="slow-path-cannot-train",
            )

    def injection_layers(self, n_layers: int) -> list[int]:
        """Return the sorted indices of the fast layers, out of `n_layers`, that get a gate."""
        first = self.pool_after
        if first >= n_layers:
            raise InputError(
                f"model.slow.pool_after must be less than the {n_layers} fast layers, not {first}, so that a "
                "layer is left to read the slow path",
                code="invalid-pool-after",
            )
        if isinstance(self.inject, str):
            if self.inject not in ("once", "each"):
                raise unknown("model.slow.inject", self.inject, ("once", "each"), code="unknown-inject")
            return [first] if self.inject == "once" else list(range(first, n_layers))
        layers = list(self.inject)
        in_range = all(first <= layer < n_layers for layer in layers)
        if not layers or not in_range or len(set(layers)) < len(layers):
            raise InputError(
                f"model.slow.inject must list fast layers from {first} to {n_layers - 1}, each once, "
                f"not {layers}",
                code="invalid-inject-layers",
            )
        return sorted(layers)
