"""Separate parameters for the queries, keys and values of one fused weight.

An optimizer has one learning rate per parameter, so a fused weight cannot train its queries faster than its
values. `split_fused_qkv` registers a parametrization: three parameters, concatenated whenever the fused
weight is read, so outputs are bit-identical. The state dict keeps the fused tensor, so checkpoints stay
compatible.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from qkflow.attention.projections import HeadShapes
from qkflow.errors import InputError
from qkflow.hf.attention_layers import (
    check_no_cross_attention,
    find_attention_layers,
    iter_attention_modules,
)
from qkflow.hf.qkv_layout import QKVLayout

QKV_ROLES = ("q", "k", "v")  # of original0, original1, original2, as `parametrize` names them


class FusedQKVParametrization(nn.Module):
    """Fused tensor built from its query, key and value rows along dimension `dim`."""

    inverse_permutation: Tensor | None

    def __init__(self, layout: QKVLayout, dim: int) -> None:
        super().__init__()
        self.layout, self.dim = layout, dim
        order = torch.cat(layout.rows())
        self.register_buffer(
            "inverse_permutation", order.argsort() if layout.interleaved else None, persistent=False
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        fused = torch.cat((q, k, v), dim=self.dim)
        if self.inverse_permutation is None:
            return fused
        return fused.index_select(self.dim, self.inverse_permutation)

    def right_inverse(self, fused: Tensor) -> tuple[Tensor, ...]:
        return tuple(fused.index_select(self.dim, rows.to(fused.device)) for rows in self.layout.rows())


def split_fused_qkv(model: nn.Module) -> list[str]:
    """Split every fused query-key-value weight and bias of `model`, in place; return their names.

    Call it before creating the optimizer, because it replaces parameters. Split layers are skipped.
    """
    split = []
    for name, module, layout in _find_fused_layers(model):
        if parametrize.is_parametrized(module):
            continue
        device = next(module.parameters()).device
        for tensor, dim in _fused_parameter_dims(module):
            parametrize.register_parametrization(
                module, tensor, FusedQKVParametrization(layout, dim).to(device)
            )
            split.append(f"{name}.{tensor}")
        vars(module)["fused_hooks"] = (
            module.register_state_dict_post_hook(_fuse_state_dict_hook),
            module.register_load_state_dict_pre_hook(_split_state_dict_hook),
        )
    return split


def fuse_qkv(model: nn.Module) -> None:
    """Undo `split_fused_qkv`."""
    for module in model.modules():
        for tensor in _split_parameter_names(module):
            parametrize.remove_parametrizations(module, tensor, leave_parametrized=True)
        for hook in vars(module).pop("fused_hooks", ()):
            hook.remove()


def is_qkv_split(module: nn.Module) -> bool:
    return bool(_split_parameter_names(module))


def _split_parameter_names(module: nn.Module) -> list[str]:
    if not parametrize.is_parametrized(module):
        return []
    parametrizations: Any = module.parametrizations
    return [name for name, chain in parametrizations.items() if isinstance(chain[0], FusedQKVParametrization)]


def _find_fused_layers(model: nn.Module) -> list[tuple[str, nn.Module, QKVLayout]]:
    fused: list[tuple[str, nn.Module, QKVLayout]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and module._qkv_same_embed_dim:
            n_heads, head_dim = module.num_heads, module.head_dim
            heads = HeadShapes(n_heads, n_heads, n_heads, head_dim, head_dim, n_heads, head_dim)
            fused.append((name, module, QKVLayout(heads, interleaved=False)))
    if any(len(projections) == 1 for _, _, projections in iter_attention_modules(model)):
        check_no_cross_attention(model, "fused weights of such models cannot be split")
        for layer in find_attention_layers(model):
            if layer.layout is not None:
                fused.append((f"{layer.name}.{layer.q_name}", layer.q, layer.layout))
    return fused


def _fused_parameter_dims(module: nn.Module) -> list[tuple[str, int]]:
    """Return the fused parameters of a layer, each with its output dimension."""
    if isinstance(module, nn.MultiheadAttention):
        dims = {"in_proj_weight": 0, "in_proj_bias": 0}
    else:
        dims = {"weight": 1 if hasattr(module, "nf") else 0, "bias": 0}
    parameters = dict(module.named_parameters(recurse=False))
    if "weight" in dims and "weight" not in parameters:
        raise InputError(
            f"the fused query-key-value weight of a {type(module).__name__} is not a parameter and cannot be "
            "split: remove adapters or dequantize the model first",
            code="adapted-projection",
        )
    return [(name, dim) for name, dim in dims.items() if name in parameters]


def _state_dict_key(prefix: str, tensor: str, part: int) -> str:
    return f"{prefix}parametrizations.{tensor}.original{part}"


def _fuse_state_dict_hook(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for tensor in _split_parameter_names(module):
        chain: Any = module.parametrizations[tensor]  # type: ignore[index]
        parts = [state_dict.pop(_state_dict_key(prefix, tensor, part)) for part in range(3)]
        state_dict[prefix + tensor] = chain[0](*parts)


def _split_state_dict_hook(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for tensor in _split_parameter_names(module):
        if prefix + tensor in state_dict:
            chain: Any = module.parametrizations[tensor]  # type: ignore[index]
            for part, value in enumerate(chain[0].right_inverse(state_dict.pop(prefix + tensor))):
                state_dict[_state_dict_key(prefix, tensor, part)] = value
