"""Column order of a fused query-key-value projection.

The projection's name does not determine it: GPT-2 and GPT-BigCode both use `c_attn` with different orders. So
it is inferred from the model. Negating a token's query must not change the outputs of later tokens; negating
its key or its value must. The projection's output is replaced by random numbers, so that no particular
weights can hide the effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qkflow.attention.inference import eval_mode
from qkflow.attention.projections import HeadShapes
from qkflow.errors import InputError

OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "out_lin", "o", "wo", "Wo", "to_out")


@dataclass(frozen=True)
class QKVLayout:
    """Column order of a fused projection.

    interleaved=False   all queries, then all keys, then all values (GPT-2, Phi-3)
    interleaved=True    for each key head: its queries, its key, its value (GPT-NeoX, Falcon)
    """

    heads: HeadShapes
    interleaved: bool

    def split(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split (…, columns) into q (…, H, D), k (…, G, D) and v (…, G, D), all views."""
        heads = self.heads
        if self.interleaved:
            by_group = fused.view(*fused.shape[:-1], heads.n_k, heads.group_size + 2, heads.head_dim)
            q, k, v = by_group.split((heads.group_size, 1, 1), dim=-2)
            return q.flatten(-3, -2), k.squeeze(-2), v.squeeze(-2)
        by_head = fused.view(*fused.shape[:-1], -1, heads.head_dim)
        q, k, v = by_head.split((heads.n_q, heads.n_k, heads.n_k), dim=-2)
        return q, k, v

    def fuse(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Invert `split`."""
        if self.interleaved:
            q = q.unflatten(-2, (self.heads.n_k, self.heads.group_size))
            return torch.cat((q, k.unsqueeze(-2), v.unsqueeze(-2)), dim=-2).flatten(-3)
        return torch.cat((q, k, v), dim=-2).flatten(-2)

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output columns (rows of a Linear's weight) of queries, keys and values."""
        columns = torch.arange((self.heads.n_q + 2 * self.heads.n_k) * self.heads.head_dim)
        q, k, v = (part.flatten() for part in self.split(columns))
        return q, k, v


def infer_qkv_layout(
    model: nn.Module, name: str, module: nn.Module, proj_name: str, heads: HeadShapes
) -> QKVLayout:
    """Run `model` up to the attention layer `module` and return the layout that explains its output."""
    for layout in (QKVLayout(heads, interleaved=False), QKVLayout(heads, interleaved=True)):
        q, k, v = layout.rows()

        def output(n_tokens: int, negated: Tensor | None = None) -> Tensor:
            return _probe_attention(model, name, module, proj_name, n_tokens, negated)

        # The second token does not read the first one's query. A single token's output is its value alone.
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
        f"'{name}.{proj_name}' ({type(module).__name__}) is not supported: its columns are neither "
        f"{heads.n_q} query, {heads.n_k} key and {heads.n_k} value heads in turn, nor each key head with its "
        "queries and value",
        code="unknown-qkv-layout",
    )


class _StopForward(Exception):  # noqa: N818 - control flow, not an error
    """Ends the forward pass once the probed layer has run."""


@torch.no_grad()
def _probe_attention(
    model: nn.Module,
    name: str,
    module: nn.Module,
    proj_name: str,
    n_tokens: int,
    negated_columns: Tensor | None,
) -> Tensor:
    """Return the layer's output at the last of `n_tokens` tokens, for a random output of its projection.

    `negated_columns` of the first token's projection change sign.
    """
    captured: list[Tensor] = []

    def inject_random_projection(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        # Unit variance: saturated attention would hide the change. A norm does not undo a change of sign.
        random = torch.randn(n_tokens, out.numel() // n_tokens, generator=torch.Generator().manual_seed(0))
        if negated_columns is not None:
            random[0, negated_columns] *= -1
        return random.view(out.shape).to(out)

    def capture(_: nn.Module, __: Any, out: Any) -> None:
        captured.append((out if isinstance(out, Tensor) else out[0]).reshape(n_tokens, -1)[-1])
        raise _StopForward

    def capture_input(layer: nn.Module, args: Any) -> None:
        capture(layer, None, args[0])  # before an output projection, whose init may be zero

    hooks = [
        module.get_submodule(proj_name).register_forward_hook(inject_random_projection),
        module.register_forward_hook(capture),
    ]
    outputs = (layer for part, layer in module.named_children() if part in OUTPUT_PROJECTIONS)
    hooks += [layer.register_forward_pre_hook(capture_input) for layer in outputs]
    weight = next(model.parameters())
    device = "cpu" if weight.is_meta else weight.device  # meta: offloaded by accelerate
    try:
        with eval_mode(model):
            model(input_ids=torch.arange(1, 1 + n_tokens, device=device).unsqueeze(0))
    except _StopForward:
        return captured[0]
    except Exception as error:
        raise InputError(
            f"the column order of '{name}.{proj_name}' cannot be inferred: running the model on {n_tokens} "
            f"tokens failed ({type(error).__name__}: {error})",
            code="qkv-probe-failed",
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    raise InputError(
        f"the column order of '{name}.{proj_name}' cannot be inferred: the layer does not run when the model "
        f"reads tokens; pass the part of the model that does, e.g. {_suggest_text_model(model)}",
        code="qkv-probe-failed",
    )


def _suggest_text_model(model: nn.Module) -> str:
    """Return an expression for the text part of a multimodal model."""
    get = getattr(model, "get_decoder", None)
    decoder = get() if callable(get) else None
    names = [name for name, module in model.named_modules() if module is decoder and name]
    return f"model.{names[0]}" if names else "model.language_model"
