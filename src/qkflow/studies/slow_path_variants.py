"""The slow path and its ablations by name, as overrides of a run config.

    slow              a slow path: P = 8, half as many layers as the fast path, a scalar gate initialized to 0
    slow:closed       slow path and gate frozen at g = 0: equals the model without a slow path
    slow:frozen       slow weights frozen at init, gate trained
    slow:warm-gate    gate initialized to a nonzero value
    dense-matched     no slow path; its FLOPs are spent on token-rate layers instead

Options of `SlowPathConfig` may follow, with P for the ratio: `slow:P=4:inject=each`,
`slow:warm-gate:gate_init=0.3`, `dense-matched:P=4` (matched to the slow path with these options).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qkflow.config_io import dataclass_from_dict, unknown_key
from qkflow.errors import InputError, unknown
from qkflow.models import ModelConfig, preset
from qkflow.models.cost import flops_per_token
from qkflow.models.slow_path.config import SlowPathConfig
from qkflow.models.slow_path.pooling import check_ratio
from qkflow.plain_data import parse_yaml

SLOW_PATH_VARIANTS = ("slow", "dense-matched")
WARM_GATE_INIT = 0.1  # at init of `tiny`, ‖g⊙ũ‖/‖x‖ is then 12% (gpt2) or 42% (fan_in)
FROZEN_ROLES = {"closed": ["slow", "gate"], "frozen": ["slow"], "warm-gate": []}
MAX_FLOPS_MISMATCH = 0.005  # relative, of `dense-matched`


@dataclass(frozen=True)
class ConfigOverrides:
    """Overrides of the sections `model` and `train` of a run config (`train.freeze`: frozen roles)."""

    model: dict[str, Any]
    train: dict[str, Any] = field(default_factory=dict)


def slow_path_variant(name: str, base: ModelConfig | Mapping[str, Any], seq_len: int) -> ConfigOverrides:
    """Return the overrides of the variant `name` for the model `base` on sequences of `seq_len` tokens.

    `base` may be the section `model` of a run config: a preset and overrides of it.
    """
    config = _resolve_model_config(base)
    kind, mode, options = _parse_slow_path_variant(name)
    slow = _slow_path_config(config, mode, options)
    check_ratio(slow.ratio, seq_len)
    slow.injection_layers(config.n_layers)  # checks `inject`
    if kind == "dense-matched":
        return ConfigOverrides(match_dense(config, slow, seq_len))
    freeze = FROZEN_ROLES[mode] if mode else []
    return ConfigOverrides({"slow": dataclasses.asdict(slow)}, {"freeze": list(freeze)} if freeze else {})


def match_dense(config: ModelConfig, slow: SlowPathConfig, seq_len: int) -> dict[str, Any]:
    """Return n_layers and hidden_dim of a dense model with the FLOPs of `config` plus the slow path.

    Adds whole layers while they fit; the remainder, less than one layer, widens the MLP of all layers.
    """
    one_layer = dataclasses.replace(config, slow=None, n_layers=1)  # all layers have the same FLOPs

    def flops(**changes: Any) -> float:
        return flops_per_token(dataclasses.replace(one_layer, **changes), seq_len)

    base = flops()
    layer = flops(n_layers=2) - base
    unit = flops(hidden_dim=one_layer.resolved_hidden_dim + 1) - base  # one hidden unit of one layer
    slow_path = flops(slow=dataclasses.replace(slow, inject="once", pool_after=0)) - base
    total = base + (config.n_layers - 1) * layer + slow_path
    n_layers = config.n_layers + int(slow_path // layer)
    hidden_dim = one_layer.resolved_hidden_dim + slow_path % layer / (unit * n_layers)
    for multiple in (64, 32, 16, 8, 4, 2, 1):  # the largest multiple that matches: aligned sizes run faster
        rounded = multiple * round(hidden_dim / multiple)
        if abs(rounded - hidden_dim) * unit * n_layers <= MAX_FLOPS_MISMATCH * total:
            return {"slow": None, "n_layers": n_layers, "hidden_dim": rounded}
    raise InputError(
        f"no MLP of dim {one_layer.dim} matches the FLOPs of the slow path within {MAX_FLOPS_MISMATCH:.1%}: "
        "one hidden unit changes more; dense-matched needs a larger dim",
        code="dense-match-impossible",
    )


def _resolve_model_config(base: ModelConfig | Mapping[str, Any]) -> ModelConfig:
    if isinstance(base, ModelConfig):
        return base
    values = dict(base)
    return preset(values.pop("preset", "tiny"), **values)


def _parse_slow_path_variant(name: str) -> tuple[str, str | None, dict[str, Any]]:
    """Split `slow:warm-gate:ratio=4` into kind, mode and options."""
    kind, *parts = name.split(":")
    if kind not in SLOW_PATH_VARIANTS:
        raise unknown("slow path variant", kind, SLOW_PATH_VARIANTS)
    modes, options = [], {}
    for part in parts:
        key, equals, value = part.partition("=")
        if equals and value:
            options["ratio" if key == "P" else key] = parse_yaml(value, f"the option '{key}'")
        elif kind == "slow" and key in FROZEN_ROLES:
            modes.append(key)
        else:
            raise unknown(
                f"option of variant '{kind}'", part, [*(FROZEN_ROLES if kind == "slow" else ()), "P=4"]
            )
    if len(modes) > 1:
        raise InputError(
            f"variant '{name}' has {len(modes)} ablations ({', '.join(modes)}): keep one",
            code="conflicting-ablations",
        )
    return kind, modes[0] if modes else None, options


def _slow_path_config(config: ModelConfig, mode: str | None, options: dict[str, Any]) -> SlowPathConfig:
    base = config.slow or SlowPathConfig(n_layers=max(1, config.n_layers // 2))
    known = {item.name for item in dataclasses.fields(SlowPathConfig)} - {"attention"}
    for key in options:
        if key not in known:
            raise unknown_key("slow", key, known)
    if mode == "closed":
        if options.get("gate_init"):
            raise InputError(
                "slow:closed freezes the gate at 0: remove gate_init", code="conflicting-ablations"
            )
        options = {**options, "gate_init": 0.0}
    if mode == "warm-gate":
        options = {"gate_init": WARM_GATE_INIT, **options}
    if isinstance(options.get("inject"), int):  # one layer index
        options = {**options, "inject": [options["inject"]]}
    return dataclass_from_dict(SlowPathConfig, {**dataclasses.asdict(base), **options}, "slow")
