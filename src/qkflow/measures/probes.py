"""All measures of one probe during training."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qkflow.measures.attention import probe_attention, summarize_probe
from qkflow.measures.circuits import CircuitTracker, circuit_metrics
from qkflow.measures.induction import induction_metrics
from qkflow.measures.slow_path import slow_path_metrics
from qkflow.models import Decoder


def probe_metrics(model: Decoder, ids: Tensor, circuit_tracker: CircuitTracker) -> dict[str, Any]:
    """Return the row of a training log, measured on windows of token ids (B, T)."""
    return {
        **summarize_probe(probe_attention(model, ids)),
        **circuit_metrics(model),
        **circuit_tracker.metrics(model),
        **induction_metrics(model),
        **slow_path_metrics(model, ids),
    }
