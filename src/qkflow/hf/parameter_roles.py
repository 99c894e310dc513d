"""Parameter roles of any model, and optimizer groups with a separate learning rate for the QK circuit.

    optimizer = torch.optim.AdamW(hf.param_groups(model, 1e-4, ratio=20, weight_decay=0.1))

Every trainable parameter is in exactly one group. `ratio` changes the learning rate of the query-key circuit
alone; weight decay and the embeddings have separate options.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn

from qkflow.errors import InputError, join_limited, unknown
from qkflow.hf.attention_layers import iter_attention_modules
from qkflow.hf.qkv_layout import OUTPUT_PROJECTIONS
from qkflow.hf.split_qkv import QKV_ROLES, split_fused_qkv
from qkflow.roles import QK_ROLES, ROLES, has_roles, parameter_roles
from qkflow.training.optimizer import parameter_groups

FUSED_QKV_ROLE = "qkv"

# Parameter names of `transformers` models outside the attention projections. The first match decides.
PARAMETER_NAME_PATTERNS: tuple[tuple[str, str], ...] = (
    (r"\.coupling\.", "coupling"),
    (r"parametrizations\.\w+\.original0$", "q"),
    (r"parametrizations\.\w+\.original1$", "k"),
    (r"parametrizations\.\w+\.original2$", "v"),
    (r"(^|\.)(q_|k_|query_|key_)\w*norm\.", "qk_norm"),
    (r"(?i)norm\w*\.|(^|\.)ln_\w+\.", "norm"),
    (r"(^|\.)pos_query_proj\.", "q"),  # DeBERTa: queries and keys of positions
    (r"(^|\.)pos_key_proj\.", "k"),
    (r"attention\.output\.", "o"),  # BERT: output projection in the parent module
    (r"embed(?!_out)|(^|\.)w[tp]e\.|relative_attention_bias|(^|\.)shared\.weight", "embed"),
    (r"lm_head|embed_out|classifier|(^|\.)score\.|qa_outputs|(^|\.)cls\.|pooler|predictions|vocab_", "head"),
    (r"^decoder\.bias$", "head"),
    (r"(^|\.)(mlp|ffn|ffn_output|feed_forward|experts|block_sparse_moe|router|DenseReluDense)\.", "mlp"),
    (r"(^|\.)(fc\d?|fc_in|fc_out|lin\d|linear\d|intermediate|output|w[123]|wi|wi_\d)\.", "mlp"),
    (r"(^|\.)(gate_proj|up_proj|down_proj|gate_up_proj|c_fc)\.", "mlp"),
    (r"(^|\.)(project_in|project_out|final_logits_bias|head)\b", "head"),
)

RoleOverrides = Mapping[str, str] | Callable[[str], str | None]


def infer_parameter_roles(model: nn.Module, roles: RoleOverrides | None = None) -> dict[str, str]:
    """Return the role of every parameter by name.

    qkflow models declare their roles. Roles in `transformers` models are inferred from the attention
    structure and known names. `roles` overrides them: a mapping of name patterns (`"*.wq.*": "q"`), or a
    function of the name.
    """
    inferred: dict[str, str | None] = {**parameter_roles(model)} if has_roles(model) else _infer_roles(model)
    if roles is not None:
        overrides = _match_role_overrides(model, roles)
        inferred |= {name: role for name, role in overrides.items() if role is not None}
    missing = [name for name, role in inferred.items() if role is None]
    if missing:
        raise InputError(
            f"{len(missing)} parameters of {type(model).__name__} have no known role: "
            f"{join_limited(missing, 8)}; pass roles={{pattern: role}}, e.g. {{'*.wq.*': 'q'}}, with roles "
            f"out of {', '.join(ROLES)}",
            code="unknown-parameter-role",
        )
    return {name: role for name, role in inferred.items() if role is not None}


def _match_role_overrides(model: nn.Module, roles: RoleOverrides) -> dict[str, str | None]:
    names = [name for name, _ in model.named_parameters()]
    if callable(roles):
        matched = {name: roles(name) for name in names}
    else:
        for pattern in roles:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise InputError(
                    f"roles: '{pattern}' matches no parameter of {type(model).__name__}",
                    code="unmatched-pattern",
                )
        matched = {name: _first_match(roles, name) for name in names}
    for role in set(matched.values()) - {None, FUSED_QKV_ROLE}:
        if role not in ROLES:
            raise unknown("role", str(role), ROLES)
    return matched


def _first_match(patterns: Mapping[str, str], name: str) -> str | None:
    return next((role for pattern, role in patterns.items() if fnmatchcase(name, pattern)), None)


def _infer_roles(model: nn.Module) -> dict[str, str | None]:
    prefixes: dict[str, str] = {}
    for name, module, projections in iter_attention_modules(model):
        path = f"{name}." if name else ""
        roles = QKV_ROLES if len(projections) > 1 else (FUSED_QKV_ROLE,)
        for part, role in zip(projections, roles, strict=True):
            prefixes[f"{path}{part}."] = role
        for part in OUTPUT_PROJECTIONS:
            if hasattr(module, part):
                prefixes[f"{path}{part}."] = "o"
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            path = f"{name}." if name else ""
            parts = {"in_proj": FUSED_QKV_ROLE, "out_proj.": "o", "bias_k": "k", "bias_v": "v"}
            parts |= {f"{part}_proj_weight": part for part in QKV_ROLES}
            prefixes |= {f"{path}{part}": role for part, role in parts.items()}
    return {name: _infer_role(name, prefixes) for name, _ in model.named_parameters()}


def _infer_role(name: str, prefixes: dict[str, str]) -> str | None:
    by_prefix = next((role for prefix, role in prefixes.items() if name.startswith(prefix)), None)
    if by_prefix is not None and not (by_prefix == FUSED_QKV_ROLE and ".parametrizations." in name):
        return by_prefix
    return next((role for pattern, role in PARAMETER_NAME_PATTERNS if re.search(pattern, name)), None)


@dataclass(frozen=True)
class ParameterSettings:
    """Optimizer settings of one parameter."""

    name: str
    role: str
    group: str
    shape: tuple[int, ...]
    lr: float
    weight_decay: float


def describe_param_groups(
    model: nn.Module,
    lr: float,
    *,
    ratio: float = 1.0,
    qk_roles: Iterable[str] = QK_ROLES,
    embed_ratio: float = 1.0,
    weight_decay: float = 0.0,
    decay: Literal["matrices", "all"] = "matrices",
    roles: RoleOverrides | None = None,
) -> list[ParameterSettings]:
    """Return the settings that `param_groups` gives each trainable parameter, in model order."""
    qk_roles = tuple(qk_roles)
    _check_options(lr, ratio, qk_roles, embed_ratio, weight_decay, decay)
    inferred = infer_parameter_roles(model, roles)
    multipliers = {"embed": embed_ratio, **dict.fromkeys(qk_roles, ratio)}
    present = {role: factor for role, factor in multipliers.items() if role in inferred.values()}
    names = {"embed": "embed", FUSED_QKV_ROLE: "fused", **dict.fromkeys(qk_roles, "qk")}
    settings = {
        name: ParameterSettings(
            name,
            group.role,
            names.get(group.role, "rest"),
            tuple(parameter.shape),
            group.lr,
            group.weight_decay,
        )
        for group in parameter_groups(model, lr, weight_decay, present, roles=inferred, decay=decay)
        for name, parameter in group.parameters.items()
    }
    return [settings[name] for name, _ in model.named_parameters() if name in settings]


def param_groups(
    model: nn.Module,
    lr: float,
    *,
    ratio: float = 1.0,
    qk_roles: Iterable[str] = QK_ROLES,
    embed_ratio: float = 1.0,
    weight_decay: float = 0.0,
    decay: Literal["matrices", "all"] = "matrices",
    roles: RoleOverrides | None = None,
    fused_qkv: Literal["split", "refuse"] = "split",
) -> list[dict[str, Any]]:
    """Return optimizer groups with learning rate `lr`, and `lr·ratio` for the query-key circuit.

    qk_roles       roles of the circuit: the projections (q, k, qk), optionally "qk_norm" and "coupling"
    embed_ratio    learning rate of the embeddings relative to `lr`
    weight_decay, decay   the rate, and which parameters decay: "matrices" or "all"
    roles          name patterns to roles, for models whose parameter names are not known
    fused_qkv      "split" gives the parts of a fused QKV weight separate parameters, in place
                   (`split_fused_qkv`; state dicts keep their keys), "refuse" raises instead

    Each group has a `name` ("qk", "embed", "rest"; "fused" for fused weights, which a ratio of 1 leaves
    whole) and the `names` of its parameters.
    """
    if fused_qkv not in ("split", "refuse"):
        raise unknown("fused_qkv", fused_qkv, ("split", "refuse"))
    qk_roles = tuple(qk_roles)
    options: dict[str, Any] = {
        "ratio": ratio,
        "qk_roles": qk_roles,
        "embed_ratio": embed_ratio,
        "weight_decay": weight_decay,
        "decay": decay,
        "roles": roles,
    }
    settings = describe_param_groups(model, lr, **options)
    fused = [row.name for row in settings if row.role == FUSED_QKV_ROLE]
    if fused and ratio != 1:
        if fused_qkv == "refuse":
            raise InputError(
                f"{join_limited(fused)} hold queries, keys and values in one parameter, which has one "
                "learning rate: use fused_qkv='split' or hf.split_fused_qkv(model)",
                code="fused-qkv",
            )
        split_fused_qkv(model)
        settings = describe_param_groups(model, lr, **options)
    if not settings:
        raise InputError(
            f"{type(model).__name__} has no trainable parameters", code="no-trainable-parameters"
        )
    if ratio != 1 and not any(row.group == "qk" for row in settings):
        raise InputError(
            f"ratio {ratio:g} has no effect: no trainable parameter has a role in {qk_roles}",
            code="no-qk-parameters",
        )
    return _build_groups(model, settings)


def _build_groups(model: nn.Module, settings: list[ParameterSettings]) -> list[dict[str, Any]]:
    """Group parameters with equal settings, as `torch.optim` takes them."""
    groups: dict[tuple[str, float, float], dict[str, Any]] = {}
    for row in settings:
        empty: dict[str, Any] = {
            "params": [],
            "lr": row.lr,
            "weight_decay": row.weight_decay,
            "name": row.group,
            "names": [],
        }
        group = groups.setdefault((row.group, row.lr, row.weight_decay), empty)
        group["params"].append(model.get_parameter(row.name))
        group["names"].append(row.name)
    return list(groups.values())


def _check_options(
    lr: float, ratio: float, qk_roles: tuple[str, ...], embed_ratio: float, weight_decay: float, decay: str
) -> None:
    for option, value in (("lr", lr), ("ratio", ratio), ("embed_ratio", embed_ratio)):
        if not value > 0 or not math.isfinite(value):
            raise InputError(
                f"{option} must be a positive number, not {value}", code=f"invalid-{option}".replace("_", "-")
            )
    if not weight_decay >= 0 or not math.isfinite(weight_decay):
        raise InputError(
            f"weight_decay must be zero or more, not {weight_decay}", code="invalid-weight-decay"
        )
    if decay not in ("matrices", "all"):
        raise unknown("decay", decay, ("matrices", "all"))
    for role in qk_roles:
        if role not in ROLES:
            raise unknown("role", role, ROLES)
