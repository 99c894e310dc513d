"""Memory of a training step, estimated on fake tensors and measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from qkflow.bench.memory import peak_memory_bytes
from qkflow.models import Decoder, ModelConfig, preset
from qkflow.training import memory
from qkflow.training.memory import MemoryModel, estimate_training_memory
from qkflow.training.muon import Muon, hidden_matrices
from qkflow.training.optimizer import AdamW, Optimizer, parameter_groups

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "plan.py"
TOLERANCE = 0.15


def config_of(**options: Any) -> ModelConfig:
    return preset("tiny", vocab_size=512, n_layers=2, dim=64, n_heads=4, **options)


@pytest.mark.parametrize(
    ("optimizer", "checkpointing", "precision"),
    [("adamw", False, "fp32"), ("muon", True, "fp32"), ("adamw", True, "bf16")],
)
def test_peak_matches_the_allocator(optimizer: Any, checkpointing: bool, precision: Any) -> None:
    config = config_of(attention={"coupling": "leapfrog:n=3"})
    options = {"optimizer": optimizer, "precision": precision, "activation_checkpointing": checkpointing}
    estimate = estimate_training_memory(config, 8, 128, **options)
    ids = torch.randint(config.vocab_size, (8, 128))

    def train() -> None:
        model = Decoder(config, seed=0)
        model.activation_checkpointing = checkpointing
        groups = parameter_groups(model, 1e-3)
        updater: Optimizer = Muon(groups, hidden_matrices(model)) if optimizer == "muon" else AdamW(groups)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = model.loss(model(ids), ids)
        loss.backward()
        updater.step()

    assert estimate.peak == pytest.approx(peak_memory_bytes(train, torch.device("cpu")), rel=TOLERANCE)


def test_kinds() -> None:
    config = config_of()
    n_bytes = 4 * sum(p.numel() for p in Decoder(config, device="meta").parameters())
    adamw, muon = (estimate_training_memory(config, 8, 128, optimizer=each) for each in ("adamw", "muon"))
    assert adamw.weights == adamw.gradients == n_bytes
    assert adamw.optimizer == pytest.approx(2 * n_bytes, rel=1e-3)
    assert muon.optimizer < 0.8 * adamw.optimizer  # one value per entry of a hidden matrix
    assert adamw.logits == 512 * 512 * 4
    checkpointed = estimate_training_memory(config, 8, 128, activation_checkpointing=True)
    assert checkpointed.activations < 0.5 * adamw.activations


def test_deep_models_and_large_batches_are_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    config = preset("tiny", vocab_size=64, n_layers=9, dim=16, n_heads=2)
    estimates = []
    for layers, tokens in ((8, 512), (9, 10**9)):
        monkeypatch.setattr(memory, "MAX_REPLAYED_LAYERS", layers)
        monkeypatch.setattr(memory, "REPLAYED_TOKENS", tokens)
        memory._backward_peaks.cache_clear()
        estimates.append(MemoryModel(config, 64).at(40))
    memory._backward_peaks.cache_clear()
    extrapolated, replayed = estimates
    assert extrapolated.peak == pytest.approx(replayed.peak, rel=0.02)
    assert extrapolated.activations == pytest.approx(replayed.activations, rel=0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_matches_resident_memory_of_presets() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "memory", "--quick", "--presets", "tiny", "--json"],
        stdout=subprocess.PIPE,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    rows = json.loads(done.stdout)
    assert [row["case"].partition(",")[0] for row in rows] == ["tiny"]
    for row in rows:
        assert abs(row["error"]) < TOLERANCE, row
