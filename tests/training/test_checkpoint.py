"""Checkpoints: damage is named and gone around, a full disk costs nothing, another config is refused."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys

import pytest
import torch

from qkflow.errors import InputError
from qkflow.training.checkpoint import CheckpointManager, DiskFullError, load_checkpoint
from qkflow.training.distributed import DistContext

TEAM = DistContext(torch.device("cpu"))


@pytest.fixture
def notes():
    return []


@pytest.fixture
def checkpoints(tmp_path, notes):
    return CheckpointManager(tmp_path / "checkpoints", "config", 2, TEAM, notes.append)


def tensors(value=0.0):
    return {"model.weight": torch.full((3, 4), value), "optimizer.steps": torch.tensor(value)}


def save(checkpoints, *steps):
    for step in steps:
        checkpoints.save(step, tensors(float(step)), {"seconds": step / 10, "threads": 1, "torch": "2"})


def loaded(checkpoint):
    found = tensors()
    load_checkpoint(checkpoint, found)
    return float(found["model.weight"][0, 0]), float(found["optimizer.steps"])


def test_saved_pruned_and_loaded(checkpoints, notes):
    assert checkpoints.latest() is None
    save(checkpoints, 1, 2, 10)
    assert [p.name for p in sorted(checkpoints.folder.iterdir())] == ["step-00000002", "step-00000010"]
    latest = checkpoints.latest()
    assert (latest.step, latest.record["seconds"], loaded(latest)) == (10, 1.0, (10.0, 10.0))
    assert notes == []


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("file", "harm", "words"),
    [
        ("state.safetensors", flip, "does not have the recorded checksum"),
        ("state.safetensors", lambda path: os.truncate(path, 50), "missing or of the wrong size"),
        ("state.safetensors", os.remove, "missing or of the wrong size"),
        ("checkpoint.json", lambda path: path.write_text("{}"), "missing or damaged"),
        (
            "checkpoint.json",
            lambda path: path.write_text(path.read_text().replace("0.2", "0.3")),
            "is damaged",
        ),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(checkpoints, notes, file, harm, words):
    save(checkpoints, 1, 2)
    damaged = checkpoints.folder / "step-00000002" / file
    harm(damaged)
    latest = checkpoints.latest()
    assert loaded(latest) == (1.0, 1.0)
    assert len(notes) == 1
    assert str(damaged) in notes[0]
    assert words in notes[0]
    save(checkpoints, 2)  # and made again in its place
    assert loaded(checkpoints.latest()) == (2.0, 2.0)


def test_a_checkpoint_of_another_config_is_refused(checkpoints, tmp_path):
    save(checkpoints, 1)
    other = CheckpointManager(checkpoints.folder, "other", 2, TEAM, print)
    with pytest.raises(InputError, match="was made with another config"):
        other.latest()


def test_what_a_killed_process_left_half_written_is_removed(checkpoints):
    save(checkpoints, 1)
    shutil.copytree(checkpoints.folder / "step-00000001", checkpoints.folder / ".step-00000002.part")
    assert checkpoints.latest().step == 1
    assert [p.name for p in checkpoints.folder.iterdir()] == ["step-00000001"]


def test_a_nearly_full_disk_costs_older_checkpoints_but_never_the_newest(checkpoints, notes, monkeypatch):
    save(checkpoints, 1, 2)
    disk = shutil.disk_usage(checkpoints.folder)
    monkeypatch.setattr("shutil.disk_usage", lambda path: disk._replace(free=1000))
    with pytest.raises(DiskFullError, match=r"a checkpoint needs 67 MB in .* and 0 MB are free"):
        save(checkpoints, 3)
    assert "removing the older checkpoint step-00000001" in notes[0]
    assert [p.name for p in checkpoints.folder.iterdir()] == ["step-00000002"]
    assert loaded(checkpoints.latest()) == (2.0, 2.0)


def test_a_disk_that_fills_up_while_training(run_folder):
    """Files beyond a few kilobytes cannot be written: the run says so at each checkpoint, and goes on."""
    folder = run_folder(steps=4, save_every=1)
    script = f"""
import resource, signal, sys
from qkflow.training import worker
class Notes(worker.Notes):
    def begin(self, run):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, {resource.RLIM_INFINITY}))
    def row(self, row):
        if row["kind"] == "eval" and row["step"] == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, ({resource.RLIM_INFINITY},) * 2)
sys.exit(worker.work(__import__("pathlib").Path({str(folder)!r}), Notes()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("training goes on") == 3
    assert re.search(r"/checkpoints/\S+ cannot be written: .*File too large", done.stderr)
    assert json.loads((folder / "result.json").read_text())["status"] == "finished"
    assert not list(folder.rglob("*.part"))


def test_no_room_is_said_before_training_begins(run_folder, monkeypatch):
    from qkflow.training import worker

    folder = run_folder()
    disk = shutil.disk_usage(folder)
    monkeypatch.setattr("shutil.disk_usage", lambda path: disk._replace(free=1000))
    assert worker.main([str(folder)]) == worker.EXIT_FAILED
    assert not (folder / "metrics.jsonl").exists()
