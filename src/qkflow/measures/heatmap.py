"""Joint histogram of attention mass and label probability, in the bins of the published figures."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BIN_EDGES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # on both axes


def attention_heatmap(mass: NDArray[np.float64], label_probs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the share (%) of instances by attention mass (rows) and probability of the label (columns).

    Both inputs have shape (N,). Instances with NaN mass are left out. Values are clipped to [0, 1], because
    sums of weights may exceed 1 by rounding.
    """
    known = ~np.isnan(mass)
    counts, _, _ = np.histogram2d(
        np.clip(mass[known], 0, 1), np.clip(label_probs[known], 0, 1), bins=(BIN_EDGES, BIN_EDGES)
    )
    shares: NDArray[np.float64] = 100 * counts / max(1, int(known.sum()))
    return shares
