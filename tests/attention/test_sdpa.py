"""The fused kernel call that all scorings share."""

from __future__ import annotations

import torch

from qkflow.attention.masks import Mask
from qkflow.attention.scorings.base import attention_weights, sdpa, weighted_sum


def test_cpu_autocast_scores_in_float32() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 16, 4, 8) for _ in range(3))
    mask = Mask(causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = sdpa(q, k, v, mask, 8**-0.5, 0.0)
    assert out.dtype == torch.float32
    expected = weighted_sum(attention_weights(q, k, mask, 8**-0.5), v)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)  # bfloat16 would be off by 1e-2
