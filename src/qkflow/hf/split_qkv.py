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

from qkflow.attention.heads import Heads
from qkflow.errors import InputError
from qkflow.hf.attention_layers import candidates, self_attentions
from qkflow.hf.qkv_layout import Layout

PARTS = ("q", "k", "v")  # of original0, original1, original2, as `parametrize` names them


class Parts(nn.Module):
    """A fused tensor made of its query, key and value rows, which lie along dimension `dim`."""

    back: Tensor | None

    def __init__(self, layout: Layout, dim: int) -> None:
        super().__init__()
        self.layout, self.dim = layout, dim
        order = torch.cat(layout.rows())
        self.register_buffer("back", order.argsort() if layout.grouped else None, persistent=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        fused = torch.cat((q, k, v), dim=self.dim)
        return fused if self.back is None else fused.index_select(self.dim, self.back)

    def right_inverse(self, fused: Tensor) -> tuple[Tensor, ...]:
        return tuple(fused.index_select(self.dim, rows.to(fused.device)) for rows in self.layout.rows())


def split_fused(model: nn.Module) -> list[str]:
    """Split every fused query-key-value weight and bias of `model`, in place; the names of what was split.

    Do it before the optimizer is made: the parameters change. Already split layers are left as they are.
    """
    done = []
    for name, module, layout in _fused_layers(model):
        if parametrize.is_parametrized(module):
            continue
        for tensor, dim in _fused_tensors(module):
            parametrize.register_parametrization(module, tensor, Parts(layout, dim).to(_device(module)))
            done.append(f"{name}.{tensor}")
        vars(module)["fused_hooks"] = (
            module.register_state_dict_post_hook(_save_fused),
            module.register_load_state_dict_pre_hook(_load_fused),
        )
    return done


def join_fused(model: nn.Module) -> None:
    """Undo `split_fused`: one parameter again."""
    for module in model.modules():
        for tensor in _split_tensors(module):
            parametrize.remove_parametrizations(module, tensor, leave_parametrized=True)
        for hook in vars(module).pop("fused_hooks", ()):
            hook.remove()


def is_split(module: nn.Module) -> bool:
    return bool(_split_tensors(module))


def _split_tensors(module: nn.Module) -> list[str]:
    if not parametrize.is_parametrized(module):
        return []
    made: Any = module.parametrizations
    return [tensor for tensor, steps in made.items() if isinstance(steps[0], Parts)]


def _fused_layers(model: nn.Module) -> list[tuple[str, nn.Module, Layout]]:
    found: list[tuple[str, nn.Module, Layout]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and module._qkv_same_embed_dim:
            count, size = module.num_heads, module.head_dim
            heads = Heads(count, count, count, size, size, count, size)
            found.append((name, module, Layout(heads, grouped=False)))
    if any(len(kind) == 1 for _, _, kind in candidates(model)):
        for site in self_attentions(model):
            if site.layout is not None:
                found.append((f"{site.name}.{site.q}", site.module.get_submodule(site.q), site.layout))
    return found


def _fused_tensors(module: nn.Module) -> list[tuple[str, int]]:
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


def _key(prefix: str, tensor: str, part: int) -> str:
    return f"{prefix}parametrizations.{tensor}.original{part}"


def _save_fused(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for tensor in _split_tensors(module):
        steps: Any = module.parametrizations[tensor]  # type: ignore[index]
        parts = [state.pop(_key(prefix, tensor, part)) for part in range(3)]
        state[prefix + tensor] = steps[0](*parts)


def _load_fused(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for tensor in _split_tensors(module):
        if prefix + tensor in state:
            steps: Any = module.parametrizations[tensor]  # type: ignore[index]
            for part, value in enumerate(steps[0].right_inverse(state.pop(prefix + tensor))):
                state[_key(prefix, tensor, part)] = value
