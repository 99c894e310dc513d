"""Peak memory of a call."""

from __future__ import annotations

import pytest
import torch

from qkflow.bench.memory import peak_memory_bytes


def test_peak_counts_tensors_alive_at_one_time() -> None:
    def fn() -> None:
        a = torch.ones(1000, 250)  # 1 MB
        b = a + 1
        del a
        c = b + 1
        del b, c

    assert peak_memory_bytes(fn, torch.device("cpu")) == pytest.approx(2e6, rel=0.01)
