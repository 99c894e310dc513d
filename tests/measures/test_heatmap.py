"""The joint histogram of attention mass and label probability."""

from __future__ import annotations

import numpy as np
import pytest

from qkflow.measures.heatmap import BIN_EDGES, attention_heatmap


def test_shares_by_mass_and_label_probability() -> None:
    mass = np.array([0.1, 0.5, 1.0 + 1e-12, np.nan])
    shares = attention_heatmap(mass, np.array([0.9, 0.1, 1.0, 0.5]))
    assert shares.shape == (len(BIN_EDGES) - 1,) * 2
    assert shares.sum() == pytest.approx(100)
    assert shares[0, 4] == shares[2, 0] == shares[4, 4] == pytest.approx(100 / 3)


def test_all_nan_gives_zeros() -> None:
    assert not attention_heatmap(np.array([np.nan]), np.array([0.5])).any()
