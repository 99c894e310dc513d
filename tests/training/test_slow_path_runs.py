"""Runs of models with a slow path: closed gate, frozen parameters, logged metrics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from qkflow.studies.slow_path_variants import slow_path_variant
from qkflow.training import worker
from qkflow.training.metrics_log import read_rows

MODEL: dict[str, Any] = {"n_layers": 2, "dim": 16, "n_heads": 2, "feed_forward": "gelu"}
Trained = Callable[[str], tuple[dict[str, Tensor], list[dict[str, Any]]]]


@pytest.fixture
def trained(run_folder: Callable[..., Path]) -> Trained:
    """Return a function that trains a variant and returns its weights and metrics."""

    def run(name: str) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        changes = slow_path_variant(name, MODEL, 16) if name else None
        model, train = (changes.model, changes.train) if changes else ({}, {})
        folder = run_folder(name.replace(":", "-") or "fast", model={**MODEL, **model}, log_every=1, **train)
        assert worker.main([str(folder)]) == 0
        return load_file(folder / "model" / "model.safetensors"), read_rows(folder / "metrics.jsonl")

    return run


def test_closed_slow_path_equals_no_slow_path(trained: Trained) -> None:
    (fast, plain), (closed, rows) = trained(""), trained("slow:closed")
    assert all(closed[name].equal(value) for name, value in fast.items())
    compared = ("kind", "step", "loss", "grad_norm")
    for before, after in zip(plain, rows, strict=True):
        assert {key: after.get(key) for key in compared} == {key: before.get(key) for key in compared}


def test_slow_path_metrics_are_logged(trained: Trained) -> None:
    _, rows = trained("slow")
    probes = [row for row in rows if row["kind"] == "probe"]
    assert probes[-1]["slow_gate"][0] > 0
    assert probes[-1]["slow_share"][0] > 0
    assert probes[-1]["slow_grad_norm"] > 0
    assert len(probes[-1]["attention_entropy"]) == 2, "one per fast layer"


def test_frozen_slow_path_only_trains_its_gate(trained: Trained) -> None:
    frozen, rows = trained("slow:frozen")
    assert "slow_grad_norm" not in rows[-1]
    closed, _ = trained("slow:closed")
    for name, value in frozen.items():
        if name.startswith("slow."):
            assert value.equal(closed[name]) is ("gates" not in name), name
