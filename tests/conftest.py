from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)  # tests run side by side; one thread each


@pytest.fixture(autouse=True)
def _process() -> Iterator[None]:
    """A command run inside a test sets threads and denormals of the whole process: undone for the next."""
    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)
    torch.set_flush_denormal(False)
