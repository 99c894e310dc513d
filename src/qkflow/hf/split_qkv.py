"""Give the queries, keys and values of one fused weight parameters of their own.

An optimizer sets one learning rate a parameter, so a fused weight cannot learn its queries faster than its
values. `split_fused` makes three parameters of it, of which the layer's weight is put together anew whenever
it is read: the same numbers, so the same outputs bit for bit. The state dict keeps its one fused tensor, so
checkpoints go both ways.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from qkflow.attention.heads import HeadShapes
from qkflow.errors import InputError
from qkflow.hf.attention_layers import find_attention_layers, iter_attention_modules
from qkflow.hf.qkv_layout import QKVLayout

QKV_ROLES = ("q", "k", "v")  # of original0, original1, original2, as `parametrize` names them


class FusedQKVParametrization(nn.Module):
    """A fused tensor made of its query, key and value rows, which lie along dimension `dim`."""

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
        return (
            fused
            if self.inverse_permutation is None
            else fused.index_select(self.dim, self.inverse_permutation)
        )

    def right_inverse(self, fused: Tensor) -> tuple[Tensor, ...]:
        return tuple(fused.index_select(self.dim, rows.to(fused.device)) for rows in self.layout.rows())


def split_fused_qkv(model: nn.Module) -> list[str]:
    """Split every fused query-key-value weight and bias of `model`, in place; the names of what was split.

    Do it before the optimizer is made: the parameters change. Already split layers are left as they are.
    """
    done = []
    for name, module, layout in _find_fused_layers(model):
        if parametrize.is_parametrized(module):
            continue
        for tensor, dim in _fused_parameter_dims(module):
            parametrize.register_parametrization(
                module, tensor, FusedQKVParametrization(layout, dim).to(_device(module))
            )
            done.append(f"{name}.{tensor}")
        vars(module)["fused_hooks"] = (
            module.register_state_dict_post_hook(_fuse_state_dict_hook),
            module.register_load_state_dict_pre_hook(_split_state_dict_hook),
        )
    return done


def fuse_qkv(model: nn.Module) -> None:
    """Undo `split_fused`: one parameter again."""
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
    made: Any = module.parametrizations
    return [tensor for tensor, steps in made.items() if isinstance(steps[0], FusedQKVParametrization)]


def _find_fused_layers(model: nn.Module) -> list[tuple[str, nn.Module, QKVLayout]]:
    found: list[tuple[str, nn.Module, QKVLayout]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and module._qkv_same_embed_dim:
            count, size = module.num_heads, module.head_dim
            heads = HeadShapes(count, count, count, size, size, count, size)
            found.append((name, module, QKVLayout(heads, interleaved=False)))
    if any(len(kind) == 1 for _, _, kind in iter_attention_modules(model)):
        for site in find_attention_layers(model):
            if site.layout is not None:
                found.append(
                    (f"{site.name}.{site.q_name}", site.module.get_submodule(site.q_name), site.layout)
                )
    return found


def _fused_parameter_dims(module: nn.Module) -> list[tuple[str, int]]:
    """The fused parameters of a layer, each with the dimension its outputs lie along."""
    if isinstance(module, nn.MultiheadAttention):
        names = {"in_proj_weight": 0, "in_proj_bias": 0}
    else:
        names = {"weight": 1 if hasattr(module, "nf") else 0, "bias": 0}
    own = dict(module.named_parameters(recurse=False))
    if "weight" in names and "weight" not in own:
        raise InputError(
            f"a {type(module).__name__} holds fused queries, keys and values, but no weight of its own to "
            "split: remove adapters or quantisation first"
        )
    return [(name, dim) for name, dim in names.items() if name in own]


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _state_dict_key(prefix: str, tensor: str, part: int) -> str:
    return f"{prefix}parametrizations.{tensor}.original{part}"


def _fuse_state_dict_hook(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for tensor in _split_parameter_names(module):
        steps: Any = module.parametrizations[tensor]  # type: ignore[index]
        parts = [state_dict.pop(_state_dict_key(prefix, tensor, part)) for part in range(3)]
        state_dict[prefix + tensor] = steps[0](*parts)


def _split_state_dict_hook(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for tensor in _split_parameter_names(module):
        if prefix + tensor in state_dict:
            steps: Any = module.parametrizations[tensor]  # type: ignore[index]
            for part, value in enumerate(steps[0].right_inverse(state_dict.pop(prefix + tensor))):
                state_dict[_state_dict_key(prefix, tensor, part)] = value
