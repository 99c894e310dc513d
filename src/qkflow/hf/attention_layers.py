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
from qkflow.attention.heads import Heads
from qkflow.errors import InputError
from qkflow.hf.qkv_layout import Layout, ask_layout

SEPARATE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("query_proj", "key_proj", "value_proj"),
    ("wq", "wk", "wv"),
    ("to_q", "to_k", "to_v"),
    ("q", "k", "v"),
)
FUSED = ("c_attn", "qkv_proj", "query_key_value", "Wqkv", "qkv")
HEAD_SIZE = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim", "dim_per_head")
HEAD_COUNT = ("num_attention_heads", "num_heads", "n_heads", "n_head")
CROSS = re.compile(r"cross_?att|encoder_attn|encdec", re.IGNORECASE)
LINEAR = re.compile(r"Delta|Lightning|Linear(Self)?Att")  # no softmax compares their queries and keys
LATENT = ("q_a_proj", "q_b_proj", "wq_a", "wq_b", "linear_q")
QUERIES = {*(names[0] for names in SEPARATE), *FUSED, *LATENT}  # children that only attention has


@dataclass(frozen=True)
class Site:
    """One self-attention layer: the module, the names of its projections, and its heads."""

    name: str
    module: nn.Module
    q: str
    k: str
    v: str | None
    heads: Heads
    ask: Callable[[], Layout] | None = None  # where queries, keys and values are one fused projection

    @cached_property
    def layout(self) -> Layout | None:
        """How a fused projection is cut, asked when it is needed: not every layer can be."""
        return None if self.ask is None else self.ask()

    def rows(self, part: str) -> Tensor | slice:
        """Which outputs of its projection are the queries (`q`), the keys or the values."""
        return slice(None) if self.layout is None else self.layout.rows()["qkv".index(part)]


def self_attentions(model: nn.Module) -> list[Site]:
    """Every self-attention layer of `model`, in order; an error says what was found where there is none."""
    refuse_meta(model)
    if any(isinstance(module, Attention) for module in model.modules()):
        raise InputError(
            "this is a qkflow model, whose coupling and start are part of it: build it with "
            "QKFlowConfig(attention={'coupling': …}, start=…), or train it with qkflow train --coupling"
        )
    known: dict[tuple[Any, ...], Layout] = {}  # layers of one kind are cut alike, so one is asked
    sites = []
    for name, module, kind in candidates(model):
        refuse_cross_attention(name, module)
        if len(kind) == 1:
            sites.append(_fused_site(model, name, module, kind[0], known))
        else:
            sites.append(_separate_site(name, module, *kind))
    if not sites:
        raise InputError(_nothing_found(model))
    return sites


def overlooked(model: nn.Module, sites: list[Site]) -> list[str]:
    """Layers with queries that are none of these: with latent keys, another layer's keys, or no softmax."""
    seen = {module for site in sites for module in site.module.modules()}
    names = []
    for name, module in model.named_modules():
        if module not in seen and any(part in QUERIES for part, _ in module.named_children()):
            seen.update(module.modules())
            names.append(f"'{name}' ({type(module).__name__})")
    return names


def refuse_meta(model: nn.Module) -> None:
    """An error if weights are missing, and not only away: accelerate's hooks fetch those it has offloaded."""
    offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    if not offloaded and any(parameter.is_meta for parameter in model.parameters()):
        raise InputError(
            f"this {type(model).__name__} has no weights yet (it is on the meta device): load them first"
        )


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[str, ...]]]:
    """Modules that look like attention, with the names of their projections (one if fused)."""
    for name, module in model.named_modules():
        children = dict(module.named_children())
        if LINEAR.search(type(module).__name__) or any(part.endswith("conv1d") for part in children):
            continue
        for names in SEPARATE:
            if all(isinstance(children.get(part), nn.Module) for part in names[:2]):
                yield name, module, names
                break
        else:
            for fused in FUSED:
                if fused in children:
                    yield name, module, (fused,)
                    break


def refuse_cross_attention(name: str, module: nn.Module) -> None:
    named = CROSS.search(name) or CROSS.search(type(module).__name__)
    if named or getattr(module, "is_cross_attention", False):
        raise InputError(
            f"'{name}' ({type(module).__name__}) is cross-attention, where no token has both a query and a "
            "key: use a part of the model without it, e.g. model.get_encoder()"
        )


def columns(layer: nn.Module, where: str) -> int:
    """The number of outputs of a projection, whatever kind of layer it is."""
    for attribute in ("out_features", "nf"):  # Linear and its quantised or LoRA forms; GPT-2's Conv1D
        value = getattr(layer, attribute, None)
        if isinstance(value, int):
            return value
    raise InputError(
        f"'{where}' is a {type(layer).__name__}, whose number of outputs cannot be read: a coupling can sit "
        "on Linear and Conv1D layers and on quantised layers with `out_features`"
    )


def outputs_first(projection: nn.Module) -> Tensor:
    """A projection's weight (outputs, inputs); of GPT-2's Conv1D, which stores its transpose, a view."""
    weight: Tensor = projection.weight  # type: ignore[assignment]
    return weight.t() if hasattr(projection, "nf") else weight


def refuse_fixed_weights(projection: nn.Module, where: str) -> None:
    """An error unless the projection's weight is an ordinary matrix that can be changed in place."""
    plain = isinstance(projection, nn.Linear) or hasattr(projection, "nf")
    weight = getattr(projection, "weight", None)
    if parametrize.is_parametrized(projection):
        raise InputError(
            f"'{where}' is parametrized: call hf.join_fused first if hf.split_fused did it, else "
            "torch.nn.utils.parametrize.remove_parametrizations"
        )
    if not plain or not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise InputError(
            f"'{where}' is a {type(projection).__name__}, whose weights cannot be changed in place: merge "
            "LoRA adapters (merge_and_unload) or undo the quantisation first"
        )
    if "weight" not in projection._parameters:
        raise InputError(
            f"the weight of '{where}' is made anew in every call (by pruning, weight_norm or spectral_norm): "
            "make that permanent first"
        )
    if weight.is_meta:
        raise InputError(f"the weights of '{where}' are offloaded: load the model into memory first")


def refuse_unfoldable(site: Site) -> None:
    """An error unless a drift can become part of this layer's query projection."""
    q, k = site.module.get_submodule(site.q), site.module.get_submodule(site.k)
    for part, projection in ((site.q, q), (site.k, k)):
        refuse_fixed_weights(projection, f"{site.name}.{part}")
    if q.bias is None and k.bias is not None:
        raise InputError(f"'{site.name}': keys have a bias and queries none, so a drift cannot be folded")


@torch.no_grad()
def fold_drift(site: Site, amount: Tensor) -> None:
    """Make the queries q + amount_h·k by the weights alone: W_Q + amount_h·W_K for each query head h."""
    refuse_unfoldable(site)
    q, k = site.module.get_submodule(site.q), site.module.get_submodule(site.k)
    heads, q_rows, k_rows = site.heads, site.rows("q"), site.rows("k")
    scale = amount.double().repeat_interleave(heads.size)
    pairs: list[Any] = [(outputs_first(q), outputs_first(k)), (q.bias, k.bias)]
    for target, source in pairs:
        if source is None:
            continue
        keys = source[k_rows].double().unflatten(0, (heads.keys, heads.size))
        keys = keys.repeat_interleave(heads.group, dim=0).flatten(0, 1)
        folded = target[q_rows].double() + scale.view(-1, *[1] * (keys.dim() - 1)) * keys
        target[q_rows] = folded.to(target.dtype)


def _separate_site(name: str, module: nn.Module, q: str, k: str, v: str) -> Site:
    size = _head_size(name, module)
    queries = columns(module.get_submodule(q), f"{name}.{q}")
    keys = columns(module.get_submodule(k), f"{name}.{k}")
    count = _declared(module, HEAD_COUNT)
    if queries % size or keys % size or (count is not None and count * size != queries):
        raise InputError(
            f"'{name}' ({type(module).__name__}): {q} gives {queries} columns and {k} {keys}, which are not "
            f"{count or 'whole'} query heads of size {size} and their keys: this family is not supported"
        )
    heads = _heads(queries // size, keys // size, size)
    return Site(name, module, q, k, v if hasattr(module, v) else None, heads)


def _fused_site(
    model: nn.Module, name: str, module: nn.Module, fused: str, known: dict[tuple[Any, ...], Layout]
) -> Site:
    size, count = _head_size(name, module), _declared(module, HEAD_COUNT)
    total = columns(module.get_submodule(fused), f"{name}.{fused}")
    keys, rest = divmod(total - (count or 0) * size, 2 * size)
    if count is None or rest or keys < 1 or count % keys:
        raise InputError(
            f"'{name}' ({type(module).__name__}): {fused} gives {total} columns, which are not {count} query "
            f"heads of size {size} with equally many keys and values: this family is not supported"
        )
    heads = _heads(count, keys, size)

    def ask() -> Layout:
        plan: Any = getattr(module, "coupling_plan", None)
        if plan is not None:  # asked before it was coupled
            return plan.layout
        kind = (type(module), fused, heads)
        if kind not in known:
            known[kind] = ask_layout(model, name, module, fused, heads)
        return known[kind]

    return Site(name, module, fused, fused, fused, heads, ask)


def _heads(queries: int, keys: int, size: int) -> Heads:
    return Heads(queries, keys, keys, size, size, queries, size)


def _declared(module: nn.Module, names: tuple[str, ...]) -> int | None:
    """A number the attention module, or else its config, states under one of these names."""
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def _head_size(name: str, module: nn.Module) -> int:
    size = _declared(module, HEAD_SIZE)
    if size is None:
        config = getattr(module, "config", None)
        width, count = getattr(config, "hidden_size", None), _declared(module, HEAD_COUNT)
        size = width // count if isinstance(width, int) and count else None
    if size is None:
        raise InputError(
            f"'{name}' ({type(module).__name__}) has projections like attention, but states no head size "
            f"({', '.join(HEAD_SIZE)}): this family is not supported"
        )
    return size


def _nothing_found(model: nn.Module) -> str:
    named = {
        f"{type(module).__name__} ({', '.join(child for child, _ in module.named_children())})": None
        for module in model.modules()
        if "attention" in type(module).__name__.lower()
    }
    found = "; ".join(list(named)[:4]) or "no module with 'attention' in its class name"
    return (
        f"no self-attention with query and key projections was found in {type(model).__name__}. "
        f"Looked for {', '.join('/'.join(names[:2]) for names in SEPARATE)} or fused {', '.join(FUSED)}; "
        f"found: {found}"
    )


Placement = dict[str, Any]  # device and dtype


def placement(layer: nn.Module, model: nn.Module) -> Placement:
    """Where a projection computes, and in what precision: of its weight, unless that is quantised or away."""
    weight = getattr(layer, "weight", None)
    hook = getattr(layer, "_hf_hook", None)  # accelerate keeps offloaded weights on the meta device
    if isinstance(weight, Tensor) and weight.is_floating_point() and not (weight.is_meta and hook):
        return {"device": weight.device, "dtype": weight.dtype}
    floating = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    dtype = getattr(layer, "compute_dtype", None) or (floating[0].dtype if floating else torch.float32)
    device = weight.device if isinstance(weight, Tensor) else (floating[0].device if floating else None)
    return {"device": getattr(hook, "execution_device", None) if hook else device, "dtype": dtype}
