"""A run that is killed at any time ends bit for bit like one that is not."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qkflow import files
from qkflow.training import loop, pretrained, worker
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


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Return a function that lets writes of a file fail for lack of space, the first `count` of them."""

    def fail(name: str, count: int) -> None:
        left = count

        def guarded(write: Callable[..., Any]) -> Callable[..., Any]:
            def call(path: Path, *args: Any, **kwargs: Any) -> Any:
                nonlocal left
                if Path(path).name == name and left:
                    left -= 1
                    raise OSError(errno.ENOSPC, "No space left on device", str(path))
                return write(path, *args, **kwargs)

            return call

        monkeypatch.setattr(files, "write_atomic", guarded(files.write_atomic))
        monkeypatch.setattr(pretrained, "write_tensors", guarded(pretrained.write_tensors))

    return fail


@pytest.mark.parametrize("name", ["model.safetensors", "result.json", "metrics.jsonl"])
def test_full_disk_at_the_end_loses_nothing(
    run_folder: Callable[..., Path],
    full_disk: Callable[[str, int], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    """The last checkpoint stays, one line says how to finish, and the same command does."""
    options = {"steps": 6, "save_every": 2, "keep_latest_k": 1}
    roomy, full = run_folder("roomy", **options), run_folder("full", **options)
    assert worker.main([str(roomy)]) == 0
    capsys.readouterr()
    if name == "metrics.jsonl":  # the last row

        def fail(*args: object, **kwargs: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(loop.Trainer, "_probe", fail)
            assert worker.main([str(full)]) == worker.EXIT_FAILED
    else:
        full_disk(name, 1)
        assert worker.main([str(full)]) == worker.EXIT_FAILED
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "resumes from step" in line or "starts again" in line
    assert line.endswith("[disk-full]")
    assert not (full / "result.json").exists()
    assert not list(full.rglob("*.part"))
    assert worker.main([str(full)]) == 0
    assert weights(full) == weights(roomy)
    assert losses(full) == losses(roomy)
    assert not (full / "checkpoints").exists()


def test_older_checkpoints_make_room_for_the_model(
    run_folder: Callable[..., Path], full_disk: Callable[[str, int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_folder(steps=6, save_every=2, keep_latest_k=2)
    full_disk("model.safetensors", 1)
    assert worker.main([str(folder)]) == 0
    assert "removing the older checkpoint step-00000002" in capsys.readouterr().err
    assert weights(folder)
