"""Parameter groups in which the query-key circuit has a learning rate of its own.

    optimizer = torch.optim.AdamW(param_groups(model, 1e-4, ratio=20, weight_decay=0.1))

Every trainable parameter is in exactly one group. Only what counts as QK changes with `ratio`; weight decay
and the embeddings are knobs of their own, so that one thing changes at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn

from qkflow.errors import InputError, unknown
from qkflow.hf.attention_layers import iter_attention_modules
from qkflow.hf.qkv_layout import OUTPUT_PROJECTIONS
from qkflow.hf.split_qkv import QKV_ROLES, split_fused_qkv
from qkflow.roles import ROLES, has_roles, parameter_roles

QK_ROLES = ("q", "k", "qk")  # the projections and their biases; "qk_norm" and "coupling" may be added
FUSED_QKV_ROLE = "qkv"

# What parameters of `transformers` models are called, outside the projections that their structure tells.
# The first row that fits the dotted name decides.
PARAMETER_NAME_PATTERNS: tuple[tuple[str, str], ...] = (
    (r"\.coupling\.", "coupling"),
    (r"parametrizations\.\w+\.original0$", "q"),
    (r"parametrizations\.\w+\.original1$", "k"),
    (r"parametrizations\.\w+\.original2$", "v"),
    (r"(^|\.)(q_|k_|query_|key_)\w*norm\.", "qk_norm"),
    (r"(?i)norm\w*\.|(^|\.)ln_\w+\.", "norm"),
    (r"(^|\.)pos_query_proj\.", "q"),  # DeBERTa's queries and keys of positions
    (r"(^|\.)pos_key_proj\.", "k"),
    (r"attention\.output\.", "o"),  # BERT keeps its output projection beside the attention
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
    """The role of every parameter by name.

    Our own models declare them; `transformers` models are read by structure and by known names; for what
    neither tells, `roles` maps name patterns (`"*.wq.*": "q"`) or names, through a function, to roles.
    """
    found: dict[str, str | None] = {**parameter_roles(model)} if has_roles(model) else _infer_roles(model)
    if roles is not None:
        found |= {
            name: role for name, role in _match_role_overrides(model, roles).items() if role is not None
        }
    lost = [name for name, role in found.items() if role is None]
    if lost:
        shown = ", ".join(lost[:8]) + (f" and {len(lost) - 8} more" if len(lost) > 8 else "")
        raise InputError(
            f"the role of {len(lost)} parameters of {type(model).__name__} is not known: {shown}. Pass "
            'roles={"pattern": "role"} that covers them, e.g. {"*.wq.*": "q"}; roles: ' + ", ".join(ROLES)
        )
    return {name: role for name, role in found.items() if role is not None}


def _match_role_overrides(model: nn.Module, roles: RoleOverrides) -> dict[str, str | None]:
    names = [name for name, _ in model.named_parameters()]
    if callable(roles):
        found = {name: roles(name) for name in names}
    else:
        for pattern in roles:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise InputError(f"the pattern '{pattern}' fits no parameter of {type(model).__name__}")
        found = {name: _first_match(roles, name) for name in names}
    for role in set(found.values()) - {None, FUSED_QKV_ROLE}:
        if role not in ROLES:
            raise unknown("role", str(role), ROLES)
    return found


def _first_match(patterns: Mapping[str, str], name: str) -> str | None:
    return next((role for pattern, role in patterns.items() if fnmatchcase(name, pattern)), None)


def _infer_roles(model: nn.Module) -> dict[str, str | None]:
    prefixes: dict[str, str] = {}
    for name, module, kind in iter_attention_modules(model):
        path = f"{name}." if name else ""
        for part, role in zip(kind, QKV_ROLES if len(kind) > 1 else (FUSED_QKV_ROLE,), strict=True):
            prefixes[f"{path}{part}."] = role
        for part in OUTPUT_PROJECTIONS:
            if hasattr(module, part):
                prefixes[f"{path}{part}."] = "o"
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            path = f"{name}." if name else ""
            own = {"in_proj": FUSED_QKV_ROLE, "out_proj.": "o", "bias_k": "k", "bias_v": "v"}
            own |= {f"{part}_proj_weight": part for part in QKV_ROLES}
            prefixes |= {f"{path}{start}": role for start, role in own.items()}
    return {name: _infer_role(name, prefixes) for name, _ in model.named_parameters()}


def _infer_role(name: str, prefixes: dict[str, str]) -> str | None:
    told = next((role for prefix, role in prefixes.items() if name.startswith(prefix)), None)
    if told is not None and not (told == FUSED_QKV_ROLE and ".parametrizations." in name):
        return told
    return next((role for pattern, role in PARAMETER_NAME_PATTERNS if re.search(pattern, name)), None)


@dataclass(frozen=True)
class ParameterSettings:
    """One parameter, as it will be trained."""

    name: str
    role: str
    group: str
    shape: tuple[int, ...]
    lr: float
    weight_decay: float
    trainable: bool


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
    """What `param_groups` does to each parameter, in the order of the model."""
    qk_roles = _validate_options(lr, ratio, tuple(qk_roles), embed_ratio, weight_decay, decay)
    found = infer_parameter_roles(model, roles)
    rows = []
    for name, parameter in model.named_parameters():
        role = found[name]
        group = "qk" if role in qk_roles else {"embed": "embed", FUSED_QKV_ROLE: "fused"}.get(role, "rest")
        rate = {"qk": ratio, "embed": embed_ratio}.get(group, 1.0)
        decays = weight_decay if decay == "all" or parameter.dim() >= 2 else 0.0
        rows.append(
            ParameterSettings(
                name, role, group, tuple(parameter.shape), lr * rate, decays, parameter.requires_grad
            )
        )
    return rows


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
    """Groups for any optimizer, with learning rate `lr`, and `lr·ratio` for the query-key circuit.

    qk            the roles that count as QK: the projections (q, k, qk) and, if added, "qk_norm", "coupling"
    embed_ratio   of the embeddings' learning rate, 1 unless it is to be studied
    weight_decay, decay   how much, and of which parameters: "matrices" or "all"
    roles         patterns to roles, for parameters that are neither ours nor known from `transformers`
    fused         "split" gives the parts of a fused QKV weight parameters of their own, in place
                  (`split_fused`; state dicts keep their form), "refuse" raises an error instead

    Each group has a `name` ("qk", "embed", "rest", or "fused" where a ratio of 1 needs no splitting) and the
    `names` of its parameters.
    """
    if fused_qkv not in ("split", "refuse"):
        raise InputError(f"fused is 'split' or 'refuse', not '{fused_qkv}'")
    options: dict[str, Any] = {
        "ratio": ratio,
        "qk_roles": qk_roles,
        "embed_ratio": embed_ratio,
        "weight_decay": weight_decay,
        "decay": decay,
        "roles": roles,
    }
    rows = describe_param_groups(model, lr, **options)
    whole = [row.name for row in rows if row.role == FUSED_QKV_ROLE and row.trainable]
    if whole and ratio != 1:
        if fused_qkv == "refuse":
            raise InputError(
                f"{', '.join(whole[:4])} hold queries, keys and values in one parameter, which an optimizer "
                "cannot train at two rates: use fused='split' or hf.split_fused_qkv(model)"
            )
        split_fused_qkv(model)
        rows = describe_param_groups(model, lr, **options)
    if ratio != 1 and not any(row.group == "qk" and row.trainable for row in rows):
        raise InputError(
            f"no trainable parameter has a role in {tuple(qk_roles)}, so a ratio changes nothing"
        )
    return _build_groups(model, rows)


def _build_groups(model: nn.Module, rows: list[ParameterSettings]) -> list[dict[str, Any]]:
    parameters = dict(model.named_parameters())
    groups: dict[tuple[str, float, float], dict[str, Any]] = {}
    for row in rows:
        if not row.trainable:
            continue
        empty = {
            "params": [],
            "lr": row.lr,
            "weight_decay": row.weight_decay,
            "name": row.group,
            "names": [],
        }
        group = groups.setdefault((row.group, row.lr, row.weight_decay), empty)
        group["params"].append(parameters[row.name])
        group["names"].append(row.name)
    placed = [id(parameter) for group in groups.values() for parameter in group["params"]]
    wanted = [id(parameter) for parameter in model.parameters() if parameter.requires_grad]
    assert sorted(placed) == sorted(wanted), "every trainable parameter is in exactly one group"
    if not placed:
        raise InputError(f"{type(model).__name__} has no trainable parameters")
    return list(groups.values())


def _validate_options(
    lr: float, ratio: float, qk_roles: tuple[str, ...], embed_ratio: float, weight_decay: float, decay: str
) -> tuple[str, ...]:
    for what, value in (("lr", lr), ("ratio", ratio), ("embed_ratio", embed_ratio)):
        if not value > 0 or not math.isfinite(value):
            raise InputError(f"{what} must be a positive number, not {value}")
    if not weight_decay >= 0 or not math.isfinite(weight_decay):
        raise InputError(f"weight_decay must be zero or more, not {weight_decay}")
    if decay not in ("matrices", "all"):
        raise InputError(f"decay is 'matrices' or 'all', not '{decay}'")
    for role in qk_roles:
        if role not in ROLES:
            raise unknown("role", role, ROLES)
    return qk_roles
