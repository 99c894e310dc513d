"""How one fused projection is cut into queries, keys and values.

Its name does not tell (GPT-2 and GPT-BigCode both call it `c_attn` and cut it differently), so the model
itself is asked: altering a token's query must change nothing that other tokens read, altering its key or
value must. What the projection gives is made up for the question, so that no weights can hide the answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qkflow.attention.heads import HeadShapes
from qkflow.errors import InputError

OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "out_lin", "o", "wo", "Wo", "to_out")


@dataclass(frozen=True)
class QKVLayout:
    """The columns of a fused projection: `blocks`, all queries, then all keys, then all values; or
    `grouped`, for each key head its queries, its key and its value (GPT-NeoX with one query a group)."""

    heads: HeadShapes
    interleaved: bool

    def split(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(…, columns) -> q (…, H, D), k (…, G, D), v (…, G, D), all views."""
        heads = self.heads
        if self.interleaved:
            by_group = fused.view(*fused.shape[:-1], heads.n_k, heads.group_size + 2, heads.head_dim)
            q, k, v = by_group.split((heads.group_size, 1, 1), dim=-2)
            return q.flatten(-3, -2), k.squeeze(-2), v.squeeze(-2)
        by_head = fused.view(*fused.shape[:-1], -1, heads.head_dim)
        q, k, v = by_head.split((heads.n_q, heads.n_k, heads.n_k), dim=-2)
        return q, k, v

    def fuse(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The inverse of `split`."""
        if self.interleaved:
            q = q.unflatten(-2, (self.heads.n_k, self.heads.group_size))
            return torch.cat((q, k.unsqueeze(-2), v.unsqueeze(-2)), dim=-2).flatten(-3)
        return torch.cat((q, k, v), dim=-2).flatten(-2)

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Which columns of the output (rows of a Linear's weight) are queries, keys and values."""
        columns = torch.arange((self.heads.n_q + 2 * self.heads.n_k) * self.heads.head_dim)
        q, k, v = (part.flatten() for part in self.split(columns))
        return q, k, v


def infer_qkv_layout(
    model: nn.Module, name: str, module: nn.Module, proj_name: str, heads: HeadShapes
) -> QKVLayout:
    """Run `model` until its layer `module` has attended, and see which columns are which."""
    for layout in (QKVLayout(heads, interleaved=False), QKVLayout(heads, interleaved=True)):
        q, k, v = layout.rows()

        def output(tokens: int, altered: Tensor | None = None) -> Tensor:
            """What the last of `tokens` tokens gets when these columns of the first one are altered."""
            return _probe_attention(model, name, module, proj_name, tokens, altered)

        # the other token never reads a query; it does read keys and values; alone, a key cannot matter
        pair, single = output(2), output(1)
        if (
            torch.equal(output(2, q), pair)
            and not torch.equal(output(2, k), pair)
            and not torch.equal(output(2, v), pair)
            and torch.equal(output(1, k), single)
            and not torch.equal(output(1, v), single)
        ):
            return layout
    raise InputError(
        f"'{name}.{proj_name}' ({type(module).__name__}) cuts its columns in a way that is not known here: "
        f"neither {heads.n_q} query, {heads.n_k} key and {heads.n_k} value heads in turn, nor "
        "each key head with its queries and value; this family is not supported"
    )


class _StopForward(Exception):  # noqa: N818 - nothing went wrong
    """The layer asked about has run; the rest of the model need not."""


@torch.no_grad()
def _probe_attention(
    model: nn.Module,
    name: str,
    module: nn.Module,
    proj_name: str,
    n_tokens: int,
    flipped_columns: Tensor | None,
) -> Tensor:
    reached: list[Tensor] = []

    def make_up(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        """Numbers of ordinary size: weights that saturate the attention would hide what is altered."""
        made = torch.randn(n_tokens, out.numel() // n_tokens, generator=torch.Generator().manual_seed(0))
        if flipped_columns is not None:
            made[0, flipped_columns] *= -1  # no norm takes that away
        return made.view(out.shape).to(out)

    def capture(_: nn.Module, __: Any, out: Any) -> None:
        reached.append((out if isinstance(out, Tensor) else out[0]).reshape(n_tokens, -1)[-1])
        raise _StopForward

    def capture_input(layer: nn.Module, given: Any) -> None:
        capture(layer, None, given[0])  # before an output projection, which may start at zero

    hooks = [
        module.get_submodule(proj_name).register_forward_hook(make_up),
        module.register_forward_hook(capture),
    ]
    outputs = (layer for part, layer in module.named_children() if part in OUTPUT_PROJECTIONS)
    hooks += [layer.register_forward_pre_hook(capture_input) for layer in outputs]
    weight = next(model.parameters())
    device = "cpu" if weight.is_meta else weight.device  # where accelerate takes weights from
    try:
        with _eval_mode(model):
            model(input_ids=torch.arange(1, 1 + n_tokens, device=device).unsqueeze(0))
    except _StopForward:
        return reached[0]
    except Exception as error:
        raise InputError(
            f"'{name}' has one fused projection, and the model could not be run on {n_tokens} tokens to learn "
            f"how it is cut ({type(error).__name__}: {error})"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    raise InputError(
        f"'{name}' is never run when the model reads tokens, so how its fused projection is cut cannot be "
        f"learnt: take the part of the model that reads them, e.g. {_suggest_text_model(model)}"
    )


def _suggest_text_model(model: nn.Module) -> str:
    """The part of a model of several that reads tokens, as one would write it."""
    get = getattr(model, "get_decoder", None)
    part = get() if callable(get) else None
    names = [name for name, module in model.named_modules() if module is part and name]
    return f"model.{names[0]}" if names else "model.language_model"


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
