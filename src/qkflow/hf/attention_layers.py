"""Find the self-attention layers of a model by their projections.

A module is attention if it has a query and a key projection as children (`q_proj`/`k_proj`, `query`/`key`, …)
or one fused query-key-value projection (`c_attn`, `qkv_proj`, …). The column order of a fused projection is
inferred by `qkflow.hf.qkv_layout`.
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
from qkflow.attention.projections import HeadShapes
from qkflow.errors import InputError, join_limited
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
LINEAR_ATTENTION_PATTERN = re.compile(r"Delta|Lightning|Linear(Self)?Att")  # class names; no softmax(QKᵀ)
LATENT_QUERY_PROJECTIONS = ("q_a_proj", "q_b_proj", "wq_a", "wq_b", "linear_q")
QUERY_PROJECTIONS = {
    *(names[0] for names in SEPARATE_PROJECTIONS),
    *FUSED_PROJECTIONS,
    *LATENT_QUERY_PROJECTIONS,
}  # child names that occur only in attention modules

FactoryKwargs = dict[str, Any]  # device and dtype


@dataclass(frozen=True)
class AttentionLayer:
    """A self-attention module, the names of its projections, and its head counts."""

    name: str
    module: nn.Module
    q_name: str
    k_name: str
    v_name: str | None
    heads: HeadShapes
    infer_layout: Callable[[], QKVLayout] | None = None  # only for a fused projection

    @cached_property
    def layout(self) -> QKVLayout | None:
        """Column order of a fused projection. Inferred lazily: it runs the model, and not every layer can."""
        return None if self.infer_layout is None else self.infer_layout()

    @property
    def q(self) -> nn.Module:
        return self.module.get_submodule(self.q_name)

    @property
    def k(self) -> nn.Module:
        return self.module.get_submodule(self.k_name)

    def rows(self, part: str) -> Tensor | slice:
        """Return the weight rows of its projection that compute part `q`, `k` or `v`."""
        return slice(None) if self.layout is None else self.layout.rows()["qkv".index(part)]


def find_attention_layers(model: nn.Module) -> list[AttentionLayer]:
    """Return the self-attention layers of `model` in module order; raise if there is none.

    Cross-attention is left out: no token has both a query and a key there.
    """
    check_weights_loaded(model)
    if any(isinstance(module, Attention) for module in model.modules()):
        raise InputError(
            "this is a qkflow model, whose coupling and init are part of its config: build it with "
            "QKFlowConfig(attention={'coupling': …}, init=…), or train it with qkflow train --coupling",
            code="qkflow-model",
        )
    layouts: dict[tuple[Any, ...], QKVLayout] = {}  # inferred once per module class and shape
    layers = []
    for name, module, projections in iter_attention_modules(model):
        if is_cross_attention(name, module):
            continue
        if len(projections) == 1:
            layers.append(_fused_attention_layer(model, name, module, projections[0], layouts))
        else:
            layers.append(_separate_attention_layer(name, module, *projections))
    if not layers:
        raise InputError(_not_found_message(model), code="no-attention-layers")
    return layers


def unsupported_layers(model: nn.Module, attn_layers: list[AttentionLayer]) -> list[str]:
    """Return the attention layers that are not in `attn_layers` and are not cross-attention.

    They have latent keys, use the keys of another layer, or have no softmax.
    """
    seen = {module for layer in attn_layers for module in layer.module.modules()}
    names = []
    for name, module in model.named_modules():
        if module not in seen and any(part in QUERY_PROJECTIONS for part, _ in module.named_children()):
            seen.update(module.modules())
            if not is_cross_attention(name, module):
                names.append(f"'{name}' ({type(module).__name__})")
    return names


def check_weights_loaded(model: nn.Module) -> None:
    """Raise if parameters are on the meta device, unless accelerate has offloaded them."""
    offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    if not offloaded and any(parameter.is_meta for parameter in model.parameters()):
        raise InputError(
            f"this {type(model).__name__} is on the meta device and has no weights: load them first",
            code="no-weights",
        )


def iter_attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[str, ...]]]:
    """Yield (name, module, projection names) of attention modules; a fused projection is a single name."""
    for name, module in model.named_modules():
        children = dict(module.named_children())
        convolved = any(part.endswith("conv1d") for part in children)
        if convolved or LINEAR_ATTENTION_PATTERN.search(type(module).__name__):
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


def is_cross_attention(name: str, module: nn.Module) -> bool:
    """Return whether an attention module reads its keys from another sequence."""
    by_name = any(CROSS_ATTENTION_PATTERN.search(text) for text in (name, type(module).__name__))
    return by_name or bool(getattr(module, "is_cross_attention", False))


def cross_attention_layers(model: nn.Module) -> list[str]:
    return [name for name, module, _ in iter_attention_modules(model) if is_cross_attention(name, module)]


def check_no_cross_attention(model: nn.Module, hint: str) -> None:
    """Raise if `model` has cross-attention; `hint` is what to do instead."""
    names = cross_attention_layers(model)
    if names:
        raise InputError(
            f"{type(model).__name__} has cross-attention ({join_limited(names, 2)}), where no token has both "
            f"a query and a key: {hint}",
            code="cross-attention",
        )


def out_features(layer: nn.Module, name: str) -> int:
    """Return the output width of a projection: Linear, its quantized or LoRA forms, or GPT-2's Conv1D."""
    for attribute in ("out_features", "nf"):
        value = getattr(layer, attribute, None)
        if isinstance(value, int):
            return value
    raise InputError(
        f"'{name}' is a {type(layer).__name__} without `out_features`: couplings support Linear, Conv1D and "
        "quantized layers that define it",
        code="unsupported-projection",
    )


def linear_weight(projection: nn.Module) -> Tensor:
    """Return a projection's weight as (outputs, inputs); for GPT-2's Conv1D a transposed view."""
    weight: Tensor = projection.weight  # type: ignore[assignment]
    return weight.t() if hasattr(projection, "nf") else weight


def check_weight_writable(projection: nn.Module, name: str) -> None:
    """Raise unless the projection's weight is a float parameter that can be changed in place."""
    plain = isinstance(projection, nn.Linear) or hasattr(projection, "nf")
    weight = getattr(projection, "weight", None)
    if parametrize.is_parametrized(projection):
        raise InputError(
            f"'{name}' is parametrized: call hf.fuse_qkv first if hf.split_fused_qkv did it, else "
            "torch.nn.utils.parametrize.remove_parametrizations",
            code="parametrized-weight",
        )
    if not plain or not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise InputError(
            f"'{name}' is a {type(projection).__name__}, whose weight cannot be changed in place: merge "
            "LoRA adapters (merge_and_unload) or dequantize the model first",
            code="adapted-projection",
        )
    if "weight" not in projection._parameters:
        raise InputError(
            f"the weight of '{name}' is recomputed in every call (by pruning, weight_norm or spectral_norm): "
            "make that permanent first",
            code="parametrized-weight",
        )
    if weight.is_meta:
        raise InputError(
            f"the weights of '{name}' are offloaded: load the model into memory first",
            code="weights-offloaded",
        )


def check_drift_foldable(attn_layer: AttentionLayer) -> None:
    """Raise unless a drift can be folded into this layer's query projection."""
    q, k = attn_layer.q, attn_layer.k
    check_weight_writable(q, f"{attn_layer.name}.{attn_layer.q_name}")
    check_weight_writable(k, f"{attn_layer.name}.{attn_layer.k_name}")
    if q.bias is None and k.bias is not None:
        raise InputError(
            f"cannot merge '{attn_layer.name}': its key projection has a bias and its query projection none; "
            "keep the coupling attached and save it with hf.save_adapter",
            code="key-bias-only",
        )


@torch.no_grad()
def fold_drift(attn_layer: AttentionLayer, drift: Tensor) -> None:
    """Fold q + d_h·k into the weights: W_Q + d_h·W_K for each query head h, with `drift` (H,)."""
    check_drift_foldable(attn_layer)
    q, k, heads = attn_layer.q, attn_layer.k, attn_layer.heads
    q_rows, k_rows = attn_layer.rows("q"), attn_layer.rows("k")
    scale = drift.double().repeat_interleave(heads.head_dim)
    pairs: list[Any] = [(linear_weight(q), linear_weight(k)), (q.bias, k.bias)]
    for target, source in pairs:
        if source is None:
            continue
        keys = source[k_rows].double().unflatten(0, (heads.n_k, heads.head_dim))
        keys = keys.repeat_interleave(heads.group_size, dim=0).flatten(0, 1)
        folded = target[q_rows].double() + scale.view(-1, *[1] * (keys.dim() - 1)) * keys
        target[q_rows] = folded.to(target.dtype)


def get_factory_kwargs(layer: nn.Module, model: nn.Module) -> FactoryKwargs:
    """Return the device and dtype a projection computes in.

    They are those of its weight. A quantized or offloaded weight falls back to `compute_dtype`, the
    execution device of accelerate's hook, or the first float parameter of `model`.
    """
    weight = getattr(layer, "weight", None)
    hook = getattr(layer, "_hf_hook", None)
    if isinstance(weight, Tensor) and weight.is_floating_point() and not (weight.is_meta and hook):
        return {"device": weight.device, "dtype": weight.dtype}
    floating = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    dtype = getattr(layer, "compute_dtype", None) or (floating[0].dtype if floating else torch.float32)
    device = weight.device if isinstance(weight, Tensor) else (floating[0].device if floating else None)
    return {"device": getattr(hook, "execution_device", None) if hook else device, "dtype": dtype}


def _separate_attention_layer(
    name: str, module: nn.Module, q_name: str, k_name: str, v_name: str
) -> AttentionLayer:
    head_dim = _head_dim(name, module)
    q_width = out_features(module.get_submodule(q_name), f"{name}.{q_name}")
    k_width = out_features(module.get_submodule(k_name), f"{name}.{k_name}")
    n_heads = _read_int_attribute(module, N_HEADS_ATTRIBUTES)
    if q_width % head_dim or k_width % head_dim or (n_heads is not None and n_heads * head_dim != q_width):
        raise InputError(
            f"'{name}' ({type(module).__name__}) is not supported: the widths {q_width} of {q_name} and "
            f"{k_width} of {k_name} do not match {n_heads or 'whole'} heads of head_dim {head_dim}",
            code="unsupported-attention",
        )
    heads = _head_shapes(q_width // head_dim, k_width // head_dim, head_dim)
    return AttentionLayer(name, module, q_name, k_name, v_name if hasattr(module, v_name) else None, heads)


def _fused_attention_layer(
    model: nn.Module,
    name: str,
    module: nn.Module,
    proj_name: str,
    layout_cache: dict[tuple[Any, ...], QKVLayout],
) -> AttentionLayer:
    head_dim, n_heads = _head_dim(name, module), _read_int_attribute(module, N_HEADS_ATTRIBUTES)
    width = out_features(module.get_submodule(proj_name), f"{name}.{proj_name}")
    n_kv_heads, remainder = divmod(width - (n_heads or 0) * head_dim, 2 * head_dim)
    if n_heads is None or remainder or n_kv_heads < 1 or n_heads % n_kv_heads:
        raise InputError(
            f"'{name}' ({type(module).__name__}) is not supported: the width {width} of {proj_name} does not "
            f"match {n_heads} query heads of head_dim {head_dim} with equally many key and value heads",
            code="unsupported-attention",
        )
    heads = _head_shapes(n_heads, n_kv_heads, head_dim)

    def infer_layout() -> QKVLayout:
        info: Any = getattr(module, "coupling_info", None)
        if info is not None:  # a coupled layer keeps its layout
            return info.layout
        key = (type(module), proj_name, heads)
        if key not in layout_cache:
            layout_cache[key] = infer_qkv_layout(model, name, module, proj_name, heads)
        return layout_cache[key]

    return AttentionLayer(name, module, proj_name, proj_name, proj_name, heads, infer_layout)


def _head_shapes(n_heads: int, n_kv_heads: int, head_dim: int) -> HeadShapes:
    return HeadShapes(n_heads, n_kv_heads, n_kv_heads, head_dim, head_dim, n_heads, head_dim)


def _read_int_attribute(module: nn.Module, names: tuple[str, ...]) -> int | None:
    """Return the first positive int among these attributes of the module, then of its config."""
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def _head_dim(name: str, module: nn.Module) -> int:
    head_dim = _read_int_attribute(module, HEAD_DIM_ATTRIBUTES)
    if head_dim is None:
        hidden_size = getattr(getattr(module, "config", None), "hidden_size", None)
        n_heads = _read_int_attribute(module, N_HEADS_ATTRIBUTES)
        head_dim = hidden_size // n_heads if isinstance(hidden_size, int) and n_heads else None
    if head_dim is None:
        raise InputError(
            f"'{name}' ({type(module).__name__}) is not supported: it has query and key projections but none "
            f"of the attributes {', '.join(HEAD_DIM_ATTRIBUTES)}",
            code="unsupported-attention",
        )
    return head_dim


def _not_found_message(model: nn.Module) -> str:
    classes = {
        f"{type(module).__name__} ({', '.join(child for child, _ in module.named_children())})": None
        for module in model.modules()
        if "attention" in type(module).__name__.lower()
    }
    seen = "; ".join(list(classes)[:4]) or "no module with 'attention' in its class name"
    separate = ", ".join("/".join(names[:2]) for names in SEPARATE_PROJECTIONS)
    return (
        f"{type(model).__name__} has no self-attention with known query and key projections ({separate}, or "
        f"fused {', '.join(FUSED_PROJECTIONS)}); it has: {seen}"
    )
