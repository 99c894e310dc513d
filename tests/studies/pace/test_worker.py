"""Exit codes of a worker, and the result.json of a failed run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from qkflow.errors import InputError
from qkflow.studies.pace import run, worker
from qkflow.studies.pace.config import PaceStudyConfig
from qkflow.studies.pace.study import plan_runs


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """The folder of a run whose data file is missing."""
    config = PaceStudyConfig("agreement", seeds=1)
    spec, *_ = plan_runs(config, config.resolve_recipe(), "data-missing.json", 7, 10)
    folder = tmp_path / "runs" / spec.id
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(spec.config))
    return folder


def test_failed_run_writes_its_error(run_folder: Path) -> None:
    assert worker.main(run_folder) == 1
    result = json.loads((run_folder / "result.json").read_text())
    assert result["status"] == "failed"
    assert "FileNotFoundError" in result["error"]


def test_bad_input_is_no_failed_run(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any) -> None:
        raise InputError("no embed()", code="no-embeddings")

    monkeypatch.setattr(run, "train_and_measure", fail)
    assert worker.main(run_folder) == 2
    assert "no embed()" in capsys.readouterr().err
    assert not (run_folder / "result.json").exists()


def test_sigterm_exits_as_interrupted(tmp_path: Path) -> None:
    code = (
        "import os, signal; from qkflow.studies.pace import worker; "
        "signal.signal(signal.SIGTERM, worker.exit_on_signal); os.kill(os.getpid(), signal.SIGTERM)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 75
