"""Runs with a slow path: closed it is not there, frozen it does not move, and what it does is logged."""

import pytest
from safetensors.torch import load_file

from qkflow.studies.slow_path_variants import slow_path_variant
from qkflow.training import worker
from qkflow.training.metrics_log import read_rows

MODEL = {"n_layers": 2, "dim": 16, "n_heads": 2, "feed_forward": "gelu"}


@pytest.fixture
def trained(run_folder):
    def run(name):
        changes = slow_path_variant(name, MODEL, 16) if name else None
        model, train = (changes.model, changes.train) if changes else ({}, {})
        folder = run_folder(name.replace(":", "-") or "fast", model={**MODEL, **model}, log_every=1, **train)
        assert worker.main([str(folder)]) == 0
        return load_file(folder / "model" / "model.safetensors"), list(read_rows(folder / "metrics.jsonl"))

    return run


def test_closed_a_run_equals_the_one_without_a_slow_path(trained):
    (fast, plain), (closed, rows) = trained(""), trained("slow:closed")
    assert all(closed[name].equal(value) for name, value in fast.items())
    for before, after in zip(plain, rows, strict=True):
        assert {key: after.get(key) for key in ("kind", "step", "loss", "grad_norm")} == {
            key: before.get(key) for key in ("kind", "step", "loss", "grad_norm")
        }


def test_what_the_slow_path_does_is_logged(trained):
    _, rows = trained("slow")
    probes = [row for row in rows if row["kind"] == "probe"]
    assert probes[-1]["slow_gate"][0] > 0
    assert probes[-1]["slow_share"][0] > 0
    assert probes[-1]["slow_grad_norm"] > 0
    assert len(probes[-1]["attention_entropy"]) == 2, "of the fast layers alone"
    frozen, rows = trained("slow:frozen")
    assert "slow_grad_norm" not in rows[-1]
    closed, _ = trained("slow:closed")
    for name, value in frozen.items():
        if name.startswith("slow."):
            assert value.equal(closed[name]) is ("gates" not in name), name
