"""Stability of a training run, from its training log: loss spikes and the tail of gradient norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

WARMUP_SHARE = 0.1  # of the steps: the loss falls too fast there to call anything a spike
SPIKE_NATS = 0.5  # a step whose loss exceeds the lowest mean loss of an earlier interval by this is a spike


@dataclass(frozen=True)
class Stability:
    """What went wrong during a run; all zero or one in a perfectly smooth one.

    spikes          logged intervals with a step whose loss is SPIKE_NATS above what was reached before
    largest_spike   its size in nats, 0 without one
    grad_norm_tail  largest gradient norm after warmup, relative to the median
    """

    spikes: int
    largest_spike: float
    grad_norm_tail: float


def measure_stability(rows: Sequence[Mapping[str, Any]]) -> Stability | None:
    """Return the stability of a run from the rows of kind `train`; None if the log is too short."""
    last = max((row["step"] for row in rows), default=0)
    names = ("loss", "loss_max", "grad_norm_max")
    kept = [
        row
        for row in rows
        if row["step"] > WARMUP_SHARE * last and all(isinstance(row.get(name), int | float) for name in names)
    ]
    if len(kept) < 3:
        return None
    lowest = np.minimum.accumulate([row["loss"] for row in kept])[:-1]
    excess = np.array([row["loss_max"] for row in kept[1:]]) - lowest
    norms = np.array([row["grad_norm_max"] for row in kept])
    return Stability(
        spikes=int((excess > SPIKE_NATS).sum()),
        largest_spike=float(max(excess.max(), 0.0)) if (excess > SPIKE_NATS).any() else 0.0,
        grad_norm_tail=float(norms.max() / max(np.median(norms), 1e-12)),
    )
