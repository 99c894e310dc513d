"""Operations whose gradients are written by hand."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad


class CustomFunction(torch.autograd.Function):
    """A function that costs its forward pass alone where no gradient is wanted.

    A subclass says what it computes up to three times:

    plain      in ordinary operations, for whoever looks inside: compilers, `torch.func`, forward mode, and
               second derivatives
    forward    in as few passes over memory as possible, free of the context
    gradients  of `forward`, from a context that holds its inputs and what it returned beside its results

    One that is linear, or keeps less than its inputs, has a `setup_context` and a `backward` of its own, of
    ordinary operations.
    """

    n_results: ClassVar[int] = 1  # how many of the outputs are results, and not just kept for `gradients`
    first_saved_output: ClassVar[int] = 1  # the first output that is kept

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # `apply` asks for it each time, and working it out takes longer than all else that `apply` does
        cls.forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]

    @classmethod
    def call(cls, *inputs: Any) -> Any:
        if torch.compiler.is_compiling() or is_transformed():
            return cls.composite(*inputs)
        # `apply` takes tens of microseconds before anything is computed, which a model that writes one token
        # at a time would feel in every layer
        out = cls.apply(*inputs) if torch.is_grad_enabled() else cls.forward(*inputs)
        if not isinstance(out, tuple) or len(out) == cls.n_results:
            return out
        return out[: cls.n_results] if cls.n_results > 1 else out[0]

    @staticmethod
    def composite(*inputs: Any) -> Any:
        raise NotImplementedError

    @staticmethod
    def gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        raise NotImplementedError

    @classmethod
    def setup_context(cls, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        beside = outputs[cls.n_results :]
        ctx.mark_non_differentiable(*beside)
        ctx.set_materialize_grads(not beside)  # zeros for what has no gradient would be passes for nothing
        ctx.others = [None if isinstance(given, Tensor) else given for given in inputs]
        given = (x if isinstance(x, Tensor) else None for x in inputs)
        ctx.save_for_backward(*given, *outputs[cls.first_saved_output :])

    @classmethod
    def backward(cls, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        if not torch.is_grad_enabled():
            return cls.gradients(ctx, *grads)
        # What comes next is to be differentiated as well. The inputs may hang together (one may be made of
        # another), so their gradients are taken at views of them, which do not.
        given = [
            other if kept is None else kept.view_as(kept)
            for kept, other in zip(ctx.saved_tensors, ctx.others, strict=False)
        ]
        results = cls.composite(*given)
        results = results if isinstance(results, tuple) else (results,)
        reached = [pair for pair in zip(results, grads, strict=False) if pair[1] is not None]
        outputs, arrived = zip(*reached, strict=True)
        wanted = [x for x, need in zip(given, ctx.needs_input_grad, strict=True) if need]
        found = iter(torch.autograd.grad(outputs, wanted, arrived, create_graph=True, allow_unused=True))
        return tuple(next(found) if need else None for need in ctx.needs_input_grad)


def is_transformed() -> bool:
    """Whether a transform of `torch.func` or forward-mode differentiation wants to see every operation."""
    transformed: bool = torch._C._are_functorch_transforms_active()
    return transformed or forward_ad._current_level >= 0
