"""The slow path and its ablations by name, as changes to the config of a run.

    slow              a slow path: P = 8, half as many layers as the fast one, a scalar gate, closed at first
    slow:closed       the same, with everything held and the gate at zero: equals the model without slow path
    slow:frozen       the slow weights stay as drawn, the gate learns: does the slow path have to learn?
    slow:warm-gate    the gate starts open: is it the idea that fails, or its cold start?
    dense-matched     no slow path; its compute goes into the token-rate layers

Any option of `SlowConfig` may follow, its ratio as P: `slow:P=4:inject=each`, `slow:warm-gate:start=0.3`,
`dense-matched:P=4` (matched to the slow path with these options).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from qkflow.config_io import dataclass_from_dict
from qkflow.errors import InputError, unknown
from qkflow.models import ModelConfig, preset
from qkflow.models.cost import flops_per_token
from qkflow.models.slow_path.config import SlowPathConfig
from qkflow.models.slow_path.pooling import check_ratio

SLOW_PATH_VARIANTS = ("slow", "dense-matched")
WARM_GATE_INIT = (
    0.1  # of a warm gate: at `tiny` the slow path then starts as 12% (gpt2) or 42% (fan_in) of the stream
)
FROZEN_ROLES = {"closed": ["slow", "gate"], "frozen": ["slow"], "warm-gate": []}
MAX_FLOPS_MISMATCH = 0.005  # largest relative difference in FLOPs of `dense-matched`


@dataclass(frozen=True)
class ConfigOverrides:
    """What a variant changes: keys of the model's config, and of the training's (`freeze`: roles held)."""

    model: dict[str, Any]
    train: dict[str, Any] = field(default_factory=dict)


def slow_path_variant(name: str, base: ModelConfig | Mapping[str, Any], seq_len: int) -> ConfigOverrides:
    """What the variant `name` changes in a run of the model `base` on sequences of `length` tokens.

    `base` may be plain data, as the section `model` of a run's config: a preset and what differs from it.
    """
    config = _resolve_model_config(base)
    kind, mode, options = _parse_slow_path_variant(name)
    slow = _slow_path_config(config, mode, options)
    check_ratio(slow.ratio, seq_len)
    slow.injection_layers(config.n_layers)  # refuses gates without a layer
    if kind == "dense-matched":
        return ConfigOverrides(match_dense(config, slow, seq_len))
    freeze = FROZEN_ROLES[mode] if mode else []
    return ConfigOverrides({"slow": dataclasses.asdict(slow)}, {"freeze": list(freeze)} if freeze else {})


def match_dense(config: ModelConfig, slow: SlowPathConfig, seq_len: int) -> dict[str, Any]:
    """Layers and feed-forward size that spend the FLOPs of the slow path at token rate.

    Whole layers as long as they fit; the rest, less than a layer, widens the feed-forward of all of them.
    """
    one = dataclasses.replace(config, slow=None, n_layers=1)  # enough to count on: layers cost the same

    def flops(**changes: Any) -> float:
        return flops_per_token(dataclasses.replace(one, **changes), seq_len)

    first = flops()
    layer = flops(n_layers=2) - first
    unit = flops(hidden_dim=one.resolved_hidden_dim + 1) - first  # of one hidden unit in one layer
    added = flops(slow=dataclasses.replace(slow, inject="once")) - first
    total = first + (config.n_layers - 1) * layer + added
    layers = config.n_layers + int(added // layer)
    hidden = one.resolved_hidden_dim + added % layer / (unit * layers)
    for multiple in (64, 32, 16, 8, 4, 2, 1):  # sizes that hardware likes: the baseline is to be at its best
        rounded = multiple * round(hidden / multiple)
        if abs(rounded - hidden) * unit * layers <= MAX_FLOPS_MISMATCH * total:
            return {"slow": None, "n_layers": layers, "hidden_dim": rounded}
    raise InputError(
        f"no feed-forward of width {one.dim} comes within {MAX_FLOPS_MISMATCH:.1%} of the slow path's compute: "
        "one hidden unit is already more; dense-matched needs a wider model"
    )


def _resolve_model_config(base: ModelConfig | Mapping[str, Any]) -> ModelConfig:
    if isinstance(base, ModelConfig):
        return base
    values = dict(base)
    return preset(values.pop("preset", "tiny"), **values)


def _parse_slow_path_variant(name: str) -> tuple[str, str | None, dict[str, Any]]:
    """`slow:warm-gate:ratio=4` as its kind, its mode and its options."""
    kind, *parts = name.split(":")
    if kind not in SLOW_PATH_VARIANTS:
        raise unknown("timescale variant", kind, SLOW_PATH_VARIANTS)
    modes, options = [], {}
    for part in parts:
        key, equals, value = part.partition("=")
        if equals and value:
            options["ratio" if key == "P" else key] = yaml.safe_load(value)
        elif kind == "slow" and key in FROZEN_ROLES:
            modes.append(key)
        else:
            raise unknown(
                f"option of variant '{kind}'", part, [*(FROZEN_ROLES if kind == "slow" else ()), "P=4"]
            )
    if len(modes) > 1:
        raise InputError(f"variant '{name}' is two ablations ({', '.join(modes)}): give one")
    return kind, modes[0] if modes else None, options


def _slow_path_config(config: ModelConfig, mode: str | None, options: dict[str, Any]) -> SlowPathConfig:
    base = config.slow or SlowPathConfig(n_layers=max(1, config.n_layers // 2))
    known = {item.name for item in dataclasses.fields(SlowPathConfig)} - {"attention"}
    for key in options:
        if key not in known:
            raise unknown("option of the slow path", key, known)
    if mode == "closed":
        if options.get("gate_init"):
            raise InputError("slow:closed holds the gate at zero: leave out start")
        options = {**options, "gate_init": 0.0}
    if mode == "warm-gate":
        options = {"gate_init": WARM_GATE_INIT, **options}
    if isinstance(options.get("inject"), int):  # one layer's number
        options = {**options, "inject": [options["inject"]]}
    return dataclass_from_dict(SlowPathConfig, {**dataclasses.asdict(base), **options}, "slow")
