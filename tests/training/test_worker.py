"""Exit codes and messages of the process that trains a run."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from input_errors import raises_code
from qkflow.training import Callback, NonFiniteError, RunConfig, Trainer, load_model, train, worker
from qkflow.training.checkpoint import verify_checkpoint
from qkflow.training.metrics_log import read_rows_by_kind

RunFolder = Callable[..., Path]


class SignalAt(Callback):
    """Send a signal to this process after a number of steps."""

    def __init__(self, step: int | None, number: signal.Signals = signal.SIGTERM) -> None:
        self.step, self.number = step, number
        self.messages: list[str] = []

    def on_step(self, trainer: Trainer, loss: Tensor) -> None:
        if trainer.step == self.step:
            os.kill(os.getpid(), self.number)

    def on_message(self, message: str) -> None:
        self.messages.append(message)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_stopped_run_resumes_bit_identically(
    run_folder: RunFolder, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    uninterrupted, stopped = run_folder("uninterrupted"), run_folder("stopped")
    assert worker.run_worker(uninterrupted) == worker.EXIT_FINISHED
    assert worker.run_worker(stopped, SignalAt(4, number)) == worker.EXIT_INTERRUPTED
    assert "stopped at step 4" in capsys.readouterr().err
    assert not (stopped / "result.json").exists()
    with raises_code("run-not-finished"):
        load_model(stopped)
    resumed = SignalAt(step=None)
    assert worker.run_worker(stopped, resumed) == worker.EXIT_FINISHED
    assert resumed.messages == ["resuming from step 4"]
    weights = [(f / "model" / "model.safetensors").read_bytes() for f in (uninterrupted, stopped)]
    assert weights[0] == weights[1]


def test_resume_reports_a_change_of_threads(run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder()
    assert worker.run_worker(folder, SignalAt(4)) == worker.EXIT_INTERRUPTED
    monkeypatch.setattr("torch.get_num_threads", lambda: 7)
    resumed = SignalAt(step=None)
    assert worker.run_worker(folder, resumed) == worker.EXIT_FINISHED
    assert len(resumed.messages) == 2
    assert "threads 1, now it is 7" in resumed.messages[1]


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"status": "finis'])
def test_run_with_a_damaged_result_is_repeated(run_folder: RunFolder, content: bytes) -> None:
    folder = run_folder(steps=1)
    (folder / "result.json").write_bytes(content)
    assert worker.main([str(folder)]) == worker.EXIT_FINISHED
    assert json.loads((folder / "result.json").read_text())["status"] == "finished"


def test_finished_run_is_not_repeated(run_folder: RunFolder) -> None:
    folder = run_folder()
    assert worker.main([str(folder)]) == worker.EXIT_FINISHED
    before = (folder / "result.json").stat().st_mtime_ns
    (folder / "checkpoints").mkdir()  # left by a kill right after the result was written
    assert worker.main([str(folder)]) == worker.EXIT_FINISHED
    assert (folder / "result.json").stat().st_mtime_ns == before
    assert not (folder / "checkpoints").exists()


def test_non_finite_loss_fails_and_keeps_the_last_finite_state(run_folder: RunFolder) -> None:
    folder = run_folder(lr=1e25, schedule="constant", clip=0, warmup=0, steps=50)
    assert worker.main([str(folder)]) == worker.EXIT_FAILED
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "failed"
    for detail in ("not finite at step", "learning rate 1e+25", "batch", "of seed 0"):
        assert detail in result["error"]
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert f"at step {verify_checkpoint(checkpoint).step + 1} " in result["error"]
    rows = read_rows_by_kind(folder / "metrics.jsonl")["train"]
    assert all(isinstance(row["loss"], float) for row in rows)
    with pytest.raises(NonFiniteError):  # resumes from the saved state and fails again
        train(folder, RunConfig.load(folder / "config.yaml"))


def test_overflow_in_the_last_update_fails(run_folder: RunFolder) -> None:
    folder = run_folder(pace=1e45, schedule="constant", warmup=0, steps=1)
    assert worker.main([str(folder)]) == worker.EXIT_FAILED
    assert "not finite after step 1" in json.loads((folder / "result.json").read_text())["error"]
    assert not list((folder / "checkpoints").glob("step-*"))  # of infinite weights


def test_unexpected_error_is_written_to_the_result(
    run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise ZeroDivisionError("a bug")

    folder = run_folder()
    monkeypatch.setattr(worker, "train", broken)
    assert worker.main([str(folder)]) == worker.EXIT_FAILED
    assert "Traceback" in capsys.readouterr().err
    result = json.loads((folder / "result.json").read_text())
    assert result == {"status": "failed", "error": "ZeroDivisionError: a bug"}


@pytest.mark.parametrize(
    ("options", "code", "named"),
    [
        ({"data": {"corpus": "nowhere/at-all.txt"}}, "corpus-not-found", "nowhere/at-all.txt"),
        ({"data": {"seq_len": 100_000}}, "text-too-short", "100001"),
        ({"data": {"fingerprint": "0" * 16}}, "data-changed", "0" * 16),
        ({"model": {"dim": 15}}, "dim-not-divisible", "15"),
        ({"device": "cuda:97"}, "device-unavailable", "cuda:97"),
        ({"device": "abacus"}, "unknown-device", "abacus"),
        ({"pace": -1}, "invalid-ratio", "-1"),
        ({"pace": "increasing:4:steps=7"}, "ratio-ramp-too-long", "7 steps"),
        ({"freeze": ["slow"]}, "unknown-role", "slow"),
        ({"compile": "inducter"}, "unknown-compile-backend", "inductor"),
        ({"writers": ["wandb"]}, "writer-not-installed", "wandb"),
        ({"keep": 1}, "renamed-key", "train.keep_latest_k"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    run_folder: RunFolder,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    code: str | None,
    named: str,
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    folder = run_folder(**options)
    assert worker.main([str(folder)]) == worker.EXIT_BAD_INPUT
    message = capsys.readouterr().err
    assert named in message
    assert code is None or f"[{code}]" in message
    assert message.count("\n") == 1
    assert {path.name for path in folder.iterdir()} <= {"config.yaml", ".worker.lock"}


def test_folder_without_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert worker.main([str(tmp_path / "nowhere")]) == worker.EXIT_BAD_INPUT
    assert "[config-not-found]" in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()
