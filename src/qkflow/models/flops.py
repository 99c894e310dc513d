"""Floating-point operations, counted as they are dispatched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count


def count_flops(call: Callable[[], object]) -> int:
    """Operations of all matrix products and attention kernels that `call` runs, backward pass included.

    Attention counts the whole square of scores, whether or not a causal kernel skips half of it.
    """
    aten = torch.ops.aten
    known: dict[Any, Any] = {  # kernels that PyTorch's own counter leaves out
        aten.mv: _matrix_times_vector,
        aten.addmv: lambda into, matrix, vector, **_: _matrix_times_vector(matrix, vector),
        aten.baddbmm_: _batched_product,
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    }
    with FlopCounterMode(display=False, custom_mapping=known) as counter:
        call()
    return counter.get_total_flops()


def _matrix_times_vector(matrix: Any, vector: Any, **_: Any) -> int:
    return 2 * int(matrix[0] * matrix[1])


def _batched_product(into: Any, a: Any, b: Any, *_: Any, **__: Any) -> int:
    batch, rows, inner = a
    return 2 * int(batch * rows * inner * b[-1])


def _attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(q, k, v)


def _attention_backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad, q, k, v)
