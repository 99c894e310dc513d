from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from qkflow.studies.variants import known_names

WORKER = (sys.executable, str(Path(__file__).with_name("toy_worker.py")))


@pytest.fixture(scope="session")
def toy() -> dict[str, Any]:
    """Settings of a comparison that runs in seconds: the toy worker, its couplings, little to train."""
    return {
        "worker": WORKER,
        "names": {**known_names(), "coupling": ("euler", "drift", "uncoupled", "broken", "picky", "sleepy")},
        "tokens": 640,
        "length": 8,
        "batch": 4,
        "lr": 0.3,
        "controls": "none",
    }
