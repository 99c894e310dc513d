from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from input_errors import raises_code
from qkflow.training import worker
from qkflow.training.metrics_log import MetricsLog, check_writers, read_rows, read_rows_by_kind, scalars


def test_resume_drops_rows_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"kind":"train","step":1,"loss":1.0}\n{"kind":"train","step":2,"loss":0.5}\n{"kind":"tra'
    )
    metrics = MetricsLog(tmp_path, resume_step=1)
    metrics.write({"kind": "train", "step": 2, "loss": float("nan"), "list": [1.0, float("inf")]})
    metrics.close()
    assert read_rows(path) == [
        {"kind": "train", "step": 1, "loss": 1.0},
        {"kind": "train", "step": 2, "loss": None, "list": [1.0, None]},
    ]


def test_reader_skips_incomplete_rows_and_keeps_the_last_of_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_rows(path) == []
    rows = ['{"kind":"eval","step":2,"loss":2}', '{"kind":"train","step":2}', '{"kind":"eval","step":1}']
    rows += ["[]", '{"step":3}', '{"kind":"eval","step":"3"}', "\udcff", '{"kind":"eval","step":2,"loss":3}']
    path.write_bytes("\n".join([*rows, '{"kind":"ev']).encode(errors="surrogateescape"))
    assert len(read_rows(path)) == 4
    assert read_rows_by_kind(path) == {
        "eval": [{"kind": "eval", "step": 1}, {"kind": "eval", "step": 2, "loss": 3}],
        "train": [{"kind": "train", "step": 2}],
    }


def test_scalars_average_lists_and_skip_text() -> None:
    row = {"kind": "probe", "step": 3, "loss": 2.0, "entropy": [1.0, None, 3.0], "empty": [], "name": "x"}
    assert scalars(row) == {"probe/loss": 2.0, "probe/entropy": 2.0}


def test_tensorboard_writer(run_folder: Callable[..., Path]) -> None:
    pytest.importorskip("tensorboard")
    folder = run_folder(writers=["tensorboard"])
    assert worker.main([str(folder)]) == worker.EXIT_FINISHED
    assert list((folder / "tensorboard").glob("events.out.*"))


def test_writer_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with raises_code("writer-not-installed") as caught:
        check_writers(["wandb"])
    assert 'pip install "qkflow[wandb]"' in str(caught.value)
