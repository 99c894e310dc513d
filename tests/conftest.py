from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)  # tests run side by side; one thread each


@pytest.fixture(autouse=True)
def _process() -> Iterator[None]:
    """Commands that run inside a test set threads and denormals for the whole process; the next starts anew."""
    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)
    torch.set_flush_denormal(False)
