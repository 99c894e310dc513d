"""The files of a study.

FOLDER/study.yaml                       config, arms and planned runs
FOLDER/runs/<run-id>/config.yaml        written before the run
                    /metrics.jsonl      appended by the worker; of two rows of the same step, the later counts
                    /result.json        written at the end of the run
                    /log.txt            stdout and stderr of the worker
                    /checkpoints/       until the run finishes
                    /model/             the trained model, of runs that are compared
FOLDER/data-….json                      encoded examples of a fine-tuning task
FOLDER/report.html  summary.json  summary.csv  curves.csv  finetune.csv
"""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qkflow.errors import InputError
from qkflow.files import check_file_name, write_atomic
from qkflow.locks import lock_folder
from qkflow.plain_data import open_regular, read_yaml
from qkflow.training.metrics_log import read_rows_by_kind
from qkflow.training.run_dir import (
    METRICS_FILE,
    MODEL_DIR,
    RESULT_FILE,
    RUN_CONFIG_FILE,
    check_result,
    read_result,
    write_failure,
)

STUDY_FILE = "study.yaml"
LOG_FILE = "log.txt"


@dataclass(frozen=True)
class RunDir:
    """The files of one run."""

    path: Path

    def write_config(self, config: dict[str, Any]) -> None:
        if not (self.path / RUN_CONFIG_FILE).exists():
            write_atomic(
                self.path / RUN_CONFIG_FILE, yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
            )

    def result(self) -> dict[str, Any] | None:
        """Return the content of result.json; None if it is missing or damaged."""
        result = read_result(self.path)
        return None if result is None else check_result(result, self.path / RESULT_FILE)

    @property
    def is_finished(self) -> bool:
        result = self.result()
        return result is not None and result.get("status") == "finished"

    def write_failure(self, error: str) -> None:
        """Write result.json for a worker that died without writing it."""
        write_failure(self.path, error)

    def clear_failure(self) -> None:
        """Remove result.json of a failed run, so that it is tried again from its last good checkpoint."""
        if not self.is_finished:
            (self.path / RESULT_FILE).unlink(missing_ok=True)

    def delete_model(self) -> None:
        """Delete the weights of a run that only measured costs or tuned the learning rate."""
        shutil.rmtree(self.path / MODEL_DIR, ignore_errors=True)

    def metrics(self) -> dict[str, list[dict[str, Any]]]:
        """Return the rows of metrics.jsonl by kind, sorted by step, one per step."""
        return read_rows_by_kind(self.path / METRICS_FILE)

    def last_log_line(self) -> str:
        """Return the last line of log.txt, which usually explains a failure."""
        try:
            with open_regular(self.path / LOG_FILE) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 8192))
                lines = file.read().decode(errors="replace").splitlines()
        except (OSError, InputError):
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


@dataclass(frozen=True)
class StudyDir:
    """The folder of a study."""

    path: Path

    def run_dir(self, run_id: str) -> RunDir:
        return RunDir(self.path / "runs" / check_file_name(f"{self.path / STUDY_FILE}: the run id", run_id))

    def load(self) -> dict[str, Any]:
        """Read `study.yaml`: of a comparison, or of a pace study."""
        try:
            study = read_yaml(self.path / STUDY_FILE, code="corrupt-study")
        except (FileNotFoundError, NotADirectoryError):
            raise InputError(
                f"{self.path} has no {STUDY_FILE}: use the folder that `qkflow compare` wrote",
                code="not-a-study",
            ) from None
        kinds = {"config": dict, "arms": list, "runs": list}
        if not isinstance(study, dict) or any(not isinstance(study.get(k), kinds[k]) for k in kinds):
            raise InputError(
                f"{self.path / STUDY_FILE} needs the keys config, arms and runs: is it of another "
                "version of qkflow?",
                code="corrupt-study",
            )
        return study

    def save(self, study: dict[str, Any]) -> None:
        write_atomic(self.path / STUDY_FILE, yaml.safe_dump(study, sort_keys=False, allow_unicode=True))

    @property
    def exists(self) -> bool:
        return (self.path / STUDY_FILE).is_file()

    def check_usable(self) -> None:
        """Raise InputError if the folder cannot hold this study; write nothing."""
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"--out {self.path} is a file: use a folder", code="not-a-folder")
        if (
            not self.exists
            and self.path.is_dir()
            and any(not p.name.startswith(".lock") for p in self.path.iterdir())
        ):
            raise InputError(
                f"--out {self.path} is not empty and not a study: use a new folder", code="folder-not-empty"
            )

    def lock(self) -> AbstractContextManager[None]:
        """Lock the folder, created if missing: two studies must not write into it."""
        return lock_folder(self.path)
