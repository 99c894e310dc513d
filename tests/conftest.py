from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)  # tests run side by side; one thread each


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
