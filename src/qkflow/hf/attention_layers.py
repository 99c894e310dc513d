"""Where the queries and keys are in a model that somebody else wrote.

Attention is found by its structure: a module with a query and a key projection as children, or with one
fused projection of queries, keys and values, of which `qkflow.hf.qkv_layout` finds out how it is cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from qkflow.attention import Attention
from qkflow.attention.heads import HeadShapes
from qkflow.errors import InputError
from qkflow.hf.qkv_layout import QKVLayout, infer_qkv_layout

SEPARATE_PROJECTIONS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("query_proj", "key_proj", "value_proj"),
    ("wq", "wk", "wv"),
    ("to_q", "to_k", "to_v"),
    ("q", "k", "v"),
)
FUSED_PROJECTIONS = ("c_attn", "qkv_proj", "query_key_value", "Wqkv", "qkv")
HEAD_DIM_ATTRIBUTES = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim", "dim_per_head")
N_HEADS_ATTRIBUTES = ("num_attention_heads", "num_heads", "n_heads", "n_head")
CROSS_ATTENTION_PATTERN = re.compile(r"cross_?att|encoder_attn|encdec", re.IGNORECASE)
LINEAR_ATTENTION_PATTERN = re.compile(
    r"Delta|Lightning|Linear(Self)?Att"
)  # no softmax compares their queries and keys
LATENT_QUERY_PROJECTIONS = ("q_a_proj", "q_b_proj", "wq_a", "wq_b", "linear_q")
QUERY_PROJECTIONS = {
    *(names[0] for names in SEPARATE_PROJECTIONS),
    *FUSED_PROJECTIONS,
    *LATENT_QUERY_PROJECTIONS,
}  # children that only attention has


@dataclass(frozen=True)
class AttentionLayer:
    """One self-attention layer: the module, the names of its projections, and its heads."""

    name: str
    module: nn.Module
    q_name: str
    k_name: str
    v_name: str | None
    heads: HeadShapes
    infer_layout: Callable[[], QKVLayout] | None = (
        None  # where queries, keys and values are one fused projection
    )

    @cached_property
    def layout(self) -> QKVLayout | None:
        """How a fused projection is cut, asked when it is needed: not every layer can be."""
        return None if self.infer_layout is None else self.infer_layout()

    def rows(self, part: str) -> Tensor | slice:
        """Which outputs of its projection are the queries (`q`), the keys or the values."""
        return slice(None) if self.layout is None else self.layout.rows()["qkv".index(part)]


def find_attention_layers(model: nn.Module) -> list[AttentionLayer]:
    """Every self-attention layer of `model`, in order; an error says what was found where there is none."""
    check_weights_loaded(model)
    if any(isinstance(module, Attention) for module in model.modules()):
        raise InputError(
            "this is a qkflow model, whose coupling and start are part of it: build it with "
            "QKFlowConfig(attention={'coupling': …}, start=…), or train it with qkflow train --coupling"
        )
    known: dict[tuple[Any, ...], QKVLayout] = {}  # layers of one kind are cut alike, so one is asked
    sites = []
    for name, module, kind in iter_attention_modules(model):
        check_self_attention(name, module)
        if len(kind) == 1:
            sites.append(_fused_attention_layer(model, name, module, kind[0], known))
        else:
            sites.append(_separate_attention_layer(name, module, *kind))
    if not sites:
        raise InputError(_not_found_message(model))
    return sites


def unsupported_layers(model: nn.Module, attn_layers: list[AttentionLayer]) -> list[str]:
    """Layers with queries that are none of these: with latent keys, another layer's keys, or no softmax."""
    seen = {module for site in attn_layers for module in site.module.modules()}
    names = []
    for name, module in model.named_modules():
        if module not in seen and any(part in QUERY_PROJECTIONS for part, _ in module.named_children()):
            seen.update(module.modules())
            names.append(f"'{name}' ({type(module).__name__})")
    return names


def check_weights_loaded(model: nn.Module) -> None:
    """An error if weights are missing, and not only away: accelerate's hooks fetch those it has offloaded."""
    offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    if not offloaded and any(parameter.is_meta for parameter in model.parameters()):
        raise InputError(
            f"this {type(model).__name__} has no weights yet (it is on the meta device): load them first"
        )


def iter_attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[str, ...]]]:
    """Modules that look like attention, with the names of their projections (one if fused)."""
    for name, module in model.named_modules():
        children = dict(module.named_children())
        if LINEAR_ATTENTION_PATTERN.search(type(module).__name__) or any(
            part.endswith("conv1d") for part in children
        ):
            continue
        for names in SEPARATE_PROJECTIONS:
            if all(isinstance(children.get(part), nn.Module) for part in names[:2]):
                yield name, module, names
                break
        else:
            for fused in FUSED_PROJECTIONS:
                if fused in children:
                    yield name, module, (fused,)
                    break


def check_self_attention(name: str, module: nn.Module) -> None:
    named = CROSS_ATTENTION_PATTERN.search(name) or CROSS_ATTENTION_PATTERN.search(type(module).__name__)
    if named or getattr(module, "is_cross_attention", False):
        raise InputError(
            f"'{name}' ({type(module).__name__}) is cross-attention, where no token has both a query and a "
            "key: use a part of the model without it, e.g. model.get_encoder()"
        )


def out_features(layer: nn.Module, name: str) -> int:
    """The number of outputs of a projection, whatever kind of layer it is."""
    for attribute in ("out_features", "nf"):  # Linear and its quantised or LoRA forms; GPT-2's Conv1D
        value = getattr(layer, attribute, None)
        if isinstance(value, int):
            return value
    raise InputError(
        f"'{name}' is a {type(layer).__name__}, whose number of outputs cannot be read: a coupling can sit "
        "on Linear and Conv1D layers and on quantised layers with `out_features`"
    )


def linear_weight(projection: nn.Module) -> Tensor:
    """A projection's weight (outputs, inputs); of GPT-2's Conv1D, which stores its transpose, a view."""
    weight: Tensor = projection.weight  # type: ignore[assignment]
    return weight.t() if hasattr(projection, "nf") else weight


def check_weight_writable(projection: nn.Module, name: str) -> None:
    """An error unless the projection's weight is an ordinary matrix that can be changed in place."""
    plain = isinstance(projection, nn.Linear) or hasattr(projection, "nf")
    weight = getattr(projection, "weight", None)
    if parametrize.is_parametrized(projection):
        raise InputError(
            f"'{name}' is parametrized: call hf.fuse_qkv first if hf.split_fused_qkv did it, else "
            "torch.nn.utils.parametrize.remove_parametrizations"
        )
    if not plain or not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise InputError(
            f"'{name}' is a {type(projection).__name__}, whose weights cannot be changed in place: merge "
            "LoRA adapters (merge_and_unload) or undo the quantisation first"
        )
    if "weight" not in projection._parameters:
        raise InputError(
            f"the weight of '{name}' is made anew in every call (by pruning, weight_norm or spectral_norm): "
            "make that permanent first"
        )
    if weight.is_meta:
        raise InputError(f"the weights of '{name}' are offloaded: load the model into memory first")


def check_drift_foldable(attn_layer: AttentionLayer) -> None:
    """An error unless a drift can become part of this layer's query projection."""
    q, k = (
        attn_layer.module.get_submodule(attn_layer.q_name),
        attn_layer.module.get_submodule(attn_layer.k_name),
    )
    for part, projection in ((attn_layer.q_name, q), (attn_layer.k_name, k)):
        check_weight_writable(projection, f"{attn_layer.name}.{part}")
    if q.bias is None and k.bias is not None:
        raise InputError(
            f"'{attn_layer.name}': keys have a bias and queries none, so a drift cannot be folded"
        )


@torch.no_grad()
def fold_drift(attn_layer: AttentionLayer, drift: Tensor) -> None:
    """Make the queries q + amount_h·k by the weights alone: W_Q + amount_h·W_K for each query head h."""
    check_drift_foldable(attn_layer)
    q, k = (
        attn_layer.module.get_submodule(attn_layer.q_name),
        attn_layer.module.get_submodule(attn_layer.k_name),
    )
    heads, q_rows, k_rows = attn_layer.heads, attn_layer.rows("q"), attn_layer.rows("k")
    scale = drift.double().repeat_interleave(heads.head_dim)
    pairs: list[Any] = [(linear_weight(q), linear_weight(k)), (q.bias, k.bias)]
    for target, source in pairs:
        if source is None:
            continue
        keys = source[k_rows].double().unflatten(0, (heads.n_k, heads.head_dim))
        keys = keys.repeat_interleave(heads.group_size, dim=0).flatten(0, 1)
        folded = target[q_rows].double() + scale.view(-1, *[1] * (keys.dim() - 1)) * keys
        target[q_rows] = folded.to(target.dtype)


def _separate_attention_layer(
    name: str, module: nn.Module, q_name: str, k_name: str, v_name: str
) -> AttentionLayer:
    size = _head_dim(name, module)
    queries = out_features(module.get_submodule(q_name), f"{name}.{q_name}")
    keys = out_features(module.get_submodule(k_name), f"{name}.{k_name}")
    count = _read_int_attribute(module, N_HEADS_ATTRIBUTES)
    if queries % size or keys % size or (count is not None and count * size != queries):
        raise InputError(
            f"'{name}' ({type(module).__name__}): {q_name} gives {queries} columns and {k_name} {keys}, which are not "
            f"{count or 'whole'} query heads of size {size} and their keys: this family is not supported"
        )
    heads = _heads(queries // size, keys // size, size)
    return AttentionLayer(name, module, q_name, k_name, v_name if hasattr(module, v_name) else None, heads)


def _fused_attention_layer(
    model: nn.Module,
    name: str,
    module: nn.Module,
    proj_name: str,
    layout_cache: dict[tuple[Any, ...], QKVLayout],
) -> AttentionLayer:
    size, count = _head_dim(name, module), _read_int_attribute(module, N_HEADS_ATTRIBUTES)
    total = out_features(module.get_submodule(proj_name), f"{name}.{proj_name}")
    keys, rest = divmod(total - (count or 0) * size, 2 * size)
    if count is None or rest or keys < 1 or count % keys:
        raise InputError(
            f"'{name}' ({type(module).__name__}): {proj_name} gives {total} columns, which are not {count} query "
            f"heads of size {size} with equally many keys and values: this family is not supported"
        )
    heads = _heads(count, keys, size)

    def ask() -> QKVLayout:
        plan: Any = getattr(module, "coupling_info", None)
        if plan is not None:  # asked before it was coupled
            return plan.layout
        kind = (type(module), proj_name, heads)
        if kind not in layout_cache:
            layout_cache[kind] = infer_qkv_layout(model, name, module, proj_name, heads)
        return layout_cache[kind]

    return AttentionLayer(name, module, proj_name, proj_name, proj_name, heads, ask)


def _heads(n_heads: int, n_kv_heads: int, head_dim: int) -> HeadShapes:
    return HeadShapes(n_heads, n_kv_heads, n_kv_heads, head_dim, head_dim, n_heads, head_dim)


def _read_int_attribute(module: nn.Module, names: tuple[str, ...]) -> int | None:
    """A number the attention module, or else its config, states under one of these names."""
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def _head_dim(name: str, module: nn.Module) -> int:
    size = _read_int_attribute(module, HEAD_DIM_ATTRIBUTES)
    if size is None:
        config = getattr(module, "config", None)
        width, count = getattr(config, "hidden_size", None), _read_int_attribute(module, N_HEADS_ATTRIBUTES)
        size = width // count if isinstance(width, int) and count else None
    if size is None:
        raise InputError(
            f"'{name}' ({type(module).__name__}) has projections like attention, but states no head size "
            f"({', '.join(HEAD_DIM_ATTRIBUTES)}): this family is not supported"
        )
    return size


def _not_found_message(model: nn.Module) -> str:
    named = {
        f"{type(module).__name__} ({', '.join(child for child, _ in module.named_children())})": None
        for module in model.modules()
        if "attention" in type(module).__name__.lower()
    }
    found = "; ".join(list(named)[:4]) or "no module with 'attention' in its class name"
    return (
        f"no self-attention with query and key projections was found in {type(model).__name__}. "
        f"Looked for {', '.join('/'.join(names[:2]) for names in SEPARATE_PROJECTIONS)} or fused {', '.join(FUSED_PROJECTIONS)}; "
        f"found: {found}"
    )


FactoryKwargs = dict[str, Any]  # device and dtype


def get_factory_kwargs(layer: nn.Module, model: nn.Module) -> FactoryKwargs:
    """Where a projection computes, and in what precision: of its weight, unless that is quantised or away."""
    weight = getattr(layer, "weight", None)
    hook = getattr(layer, "_hf_hook", None)  # accelerate keeps offloaded weights on the meta device
    if isinstance(weight, Tensor) and weight.is_floating_point() and not (weight.is_meta and hook):
        return {"device": weight.device, "dtype": weight.dtype}
    floating = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    dtype = getattr(layer, "compute_dtype", None) or (floating[0].dtype if floating else torch.float32)
    device = weight.device if isinstance(weight, Tensor) else (floating[0].device if floating else None)
    return {"device": getattr(hook, "execution_device", None) if hook else device, "dtype": dtype}
