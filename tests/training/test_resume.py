"""A run that is killed at any time ends bit for bit like one that is not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from qkflow.training import worker
from qkflow.training.metrics_log import read_rows


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def losses(folder: Path) -> list[tuple[str, int, float]]:
    rows = read_rows(folder / "metrics.jsonl")
    return [(row["kind"], row["step"], row["loss"]) for row in rows if "loss" in row]


def kill_repeatedly(folder: Path, *how: str) -> list[int]:
    script = Path(__file__).with_name("kill_worker.py")
    done = subprocess.run([sys.executable, script, folder, *how], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [int(n) for n in re.findall(r"\d+", done.stdout)][:2]


@pytest.mark.parametrize("how", ["random", "exact"])
def test_killed_run_is_bit_identical(run_folder: Callable[..., Path], how: str) -> None:
    options = {"steps": 200 if how == "random" else 30, "save_every": 1, "evaluations": 3, "log_every": 1}
    model = {"attention": {"coupling": "leapfrog:n=2", "dropout": 0.1}}
    uninterrupted = run_folder("uninterrupted", model=model, **options)
    killed = run_folder("killed", model=model, **options)
    assert worker.main([str(uninterrupted)]) == 0
    kills, while_writing = kill_repeatedly(killed, how, "1")
    assert kills >= 20
    assert while_writing >= (how == "exact")  # a random kill may not happen while writing
    assert weights(killed) == weights(uninterrupted)
    assert losses(killed) == losses(uninterrupted)
    results = [json.loads((f / "result.json").read_text()) for f in (killed, uninterrupted)]
    assert results[0]["loss"] == results[1]["loss"]
    assert not (killed / "checkpoints").exists()
