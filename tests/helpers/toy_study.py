"""Settings of a comparison that runs in seconds: the toy worker, its couplings, few tokens."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from qkflow.studies import ComparisonConfig
from qkflow.studies.variants import ComponentRegistry, registered_components

WORKER = (sys.executable, str(Path(__file__).with_name("toy_worker.py")))
COUPLINGS = ("euler", "drift", "uncoupled", "broken", "picky", "sleepy")


def no_corpus(config: ComparisonConfig) -> dict[str, Any]:
    """The toy worker generates its own data."""
    return {}


TOY: dict[str, Any] = {
    "worker_command": WORKER,
    "components": ComponentRegistry({**registered_components().names, "coupling": COUPLINGS}),
    "prepare_data": no_corpus,
    "tokens": 640,
    "seq_len": 8,
    "batch_size": 4,
    "lr": 0.3,
    "controls": "none",
    "screening_seeds": 2,
}
SMALL_GRID = {"inits": "gpt2,fan_in", "seeds": 3}
