from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from input_errors import raises_code
from qkflow.training import worker
from qkflow.training.checkpoint import (
    Checkpoint,
    CheckpointManager,
    CorruptCheckpointError,
    DiskFullError,
    _manifest_checksum,
    load_checkpoint,
)
from qkflow.training.distributed import DistContext

ONE_PROCESS = DistContext(torch.device("cpu"))


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def checkpoints(tmp_path: Path, messages: list[str]) -> CheckpointManager:
    return CheckpointManager(tmp_path / "checkpoints", "config", 2, ONE_PROCESS, messages.append)


def tensors(value: float = 0.0) -> dict[str, Tensor]:
    return {"model.weight": torch.full((3, 4), value), "optimizer.steps": torch.tensor(value)}


def save(checkpoints: CheckpointManager, *steps: int) -> None:
    for step in steps:
        checkpoints.save(step, tensors(float(step)), {"seconds": step / 10, "threads": 1, "torch": "2"})


def loaded(checkpoint: Checkpoint | None) -> tuple[float, float]:
    assert checkpoint is not None
    state = tensors()
    load_checkpoint(checkpoint, state)
    return float(state["model.weight"][0, 0]), float(state["optimizer.steps"])


def test_save_prune_and_load(checkpoints: CheckpointManager, messages: list[str]) -> None:
    assert checkpoints.latest() is None
    save(checkpoints, 1, 2, 10)
    assert [p.name for p in sorted(checkpoints.folder.iterdir())] == ["step-00000002", "step-00000010"]
    latest = checkpoints.latest()
    assert latest is not None
    assert (latest.step, latest.manifest["seconds"], loaded(latest)) == (10, 1.0, (10.0, 10.0))
    assert messages == []


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def change_seconds(path: Path) -> None:
    path.write_text(path.read_text().replace("0.2", "0.3"))


def seal_with(**changes: object) -> Callable[[Path], None]:
    """Return a change of the manifest with the checksum that it then needs: strangers can compute it, too."""

    def change(path: Path) -> None:
        manifest = {**json.loads(path.read_bytes()), **changes}
        del manifest["checksum"]
        path.write_text(json.dumps(manifest | {"checksum": _manifest_checksum(manifest)}))

    return change


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("checkpoint.json", seal_with(files=3)),
        ("checkpoint.json", seal_with(files={"state.safetensors": {"bytes": []}})),
        ("checkpoint.json", seal_with(step="x")),
        ("checkpoint.json", seal_with(step=-1)),
        ("checkpoint.json", seal_with(seconds=None)),
        ("state.safetensors", flip_last_bit),
        ("state.safetensors", lambda path: os.truncate(path, 50)),
        ("state.safetensors", os.remove),
        ("checkpoint.json", lambda path: path.write_text("{}")),
        ("checkpoint.json", lambda path: path.write_text("[]")),
        ("checkpoint.json", change_seconds),
    ],
)
def test_damaged_checkpoint_falls_back_to_the_previous_one(
    checkpoints: CheckpointManager, messages: list[str], file: str, damage: Callable[[Path], None]
) -> None:
    save(checkpoints, 1, 2)
    damaged = checkpoints.folder / "step-00000002" / file
    damage(damaged)
    assert loaded(checkpoints.latest()) == (1.0, 1.0)
    assert len(messages) == 1
    assert str(damaged) in messages[0]
    save(checkpoints, 2)  # replaces the damaged one
    assert loaded(checkpoints.latest()) == (2.0, 2.0)


def test_checkpoint_of_another_config_is_refused(checkpoints: CheckpointManager) -> None:
    save(checkpoints, 1)
    other = CheckpointManager(checkpoints.folder, "other", 2, ONE_PROCESS, print)
    with raises_code("checkpoint-of-another-config"):
        other.latest()


@pytest.mark.parametrize("file", ["state.safetensors", "shard-00001-model-00001-of-00001.safetensors"])
@pytest.mark.parametrize("tensor", [{"model.more": torch.zeros(2)}, {"model.w": torch.zeros(5)}])
def test_tensors_of_another_model_are_refused(
    checkpoints: CheckpointManager, file: str, tensor: dict[str, torch.Tensor]
) -> None:
    """The second file name is that of a sharded checkpoint, read by `torch.distributed.checkpoint`."""
    checkpoints.save(1, {"model.w": torch.zeros(3)}, {"seconds": 0.1})
    path = checkpoints.folder / "step-00000001"
    (path / "state.safetensors").rename(path / file)
    checkpoint = Checkpoint(path, {})
    load_checkpoint(checkpoint, {"model.w": torch.ones(3)})
    with pytest.raises(CorruptCheckpointError):
        load_checkpoint(checkpoint, tensor)


def test_checkpoint_of_an_older_format_is_refused(checkpoints: CheckpointManager) -> None:
    save(checkpoints, 1)
    manifest = checkpoints.folder / "step-00000001" / "checkpoint.json"
    manifest.write_text(json.dumps({"format": 1, "step": 1, "seal": "0", "files": {}}))
    with raises_code("checkpoint-format"):
        checkpoints.latest()


def test_incomplete_checkpoints_are_removed(checkpoints: CheckpointManager) -> None:
    save(checkpoints, 1)
    for name in (".step-00000002.part", ".step-00000001.old.part"):
        shutil.copytree(checkpoints.folder / "step-00000001", checkpoints.folder / name)
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.step == 1
    assert [p.name for p in checkpoints.folder.iterdir()] == ["step-00000001"]


def test_full_disk_removes_older_checkpoints_but_not_the_newest(
    checkpoints: CheckpointManager, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(checkpoints, 1, 2)
    disk = shutil.disk_usage(checkpoints.folder)
    monkeypatch.setattr("shutil.disk_usage", lambda path: disk._replace(free=1000))
    with pytest.raises(DiskFullError, match=r"67 MB in .* 0 MB"):
        save(checkpoints, 3)
    assert "step-00000001" in messages[0]
    assert [p.name for p in checkpoints.folder.iterdir()] == ["step-00000002"]
    assert loaded(checkpoints.latest()) == (2.0, 2.0)


def test_training_continues_if_a_checkpoint_cannot_be_written(run_folder: Callable[..., Path]) -> None:
    """Files larger than 8 kB cannot be written until the last evaluation."""
    folder = run_folder(steps=4, save_every=1)
    script = f"""
import resource, signal, sys
from pathlib import Path
from qkflow.training import callbacks, worker
class LimitFileSize(callbacks.StderrCallback):
    def on_start(self, trainer):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, {resource.RLIM_INFINITY}))
    def on_metrics(self, row):
        if row["kind"] == "eval" and row["step"] == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, ({resource.RLIM_INFINITY},) * 2)
sys.exit(worker.run_worker(Path({str(folder)!r}), LimitFileSize()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"File too large: '\S+/checkpoints/", done.stderr)) == 3
    assert json.loads((folder / "result.json").read_text())["status"] == "finished"
    assert not list(folder.rglob("*.part"))


def test_full_disk_is_reported_before_training(
    run_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_folder()
    disk = shutil.disk_usage(folder)
    monkeypatch.setattr("shutil.disk_usage", lambda path: disk._replace(free=1000))
    assert worker.main([str(folder)]) == worker.EXIT_FAILED
    assert not (folder / "metrics.jsonl").exists()
