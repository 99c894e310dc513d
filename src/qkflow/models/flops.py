"""Floating-point operations, counted as they are dispatched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count


def count_flops(fn: Callable[[], object]) -> int:
    """Operations of all matrix products and attention kernels that `call` runs, backward pass included.

    Attention counts the whole square of scores, whether or not a causal kernel skips half of it.
    """
    aten = torch.ops.aten
    known: dict[Any, Any] = {  # kernels that PyTorch's own counter leaves out
        aten.mv: _mv_flops,
        aten.addmv: lambda into, matrix, vector, **_: _mv_flops(matrix, vector),
        aten.baddbmm_: _baddbmm_flops,
        aten._scaled_dot_product_flash_attention_for_cpu: _sdpa_flops,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _sdpa_backward_flops,
    }
    with FlopCounterMode(display=False, custom_mapping=known) as counter:
        fn()
    return counter.get_total_flops()


def _mv_flops(matrix: Any, vector: Any, **_: Any) -> int:
    return 2 * int(matrix[0] * matrix[1])


def _baddbmm_flops(into: Any, a: Any, b: Any, *_: Any, **__: Any) -> int:
    batch, rows, inner = a
    return 2 * int(batch * rows * inner * b[-1])


def _sdpa_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(q, k, v)


def _sdpa_backward_flops(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad, q, k, v)
