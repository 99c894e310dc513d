"""A study's folder: what was asked, one folder per run, what came out.

FOLDER/study.yaml                       the question, the arms, the planned runs
FOLDER/runs/<run-id>/config.yaml        written before the run
                    /metrics.jsonl      appended by the worker; of two rows of one step the later counts
                    /result.json        written at the end: there = the run is over
                    /checkpoints/       while it goes; a finished run has none
                    /model/             the trained model, of runs that are compared; log.txt
FOLDER/report.html  summary.json  summary.csv  curves.csv
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qkflow.errors import InputError
from qkflow.files import make_folder, write_atomic, write_json
from qkflow.training.run_dir import read_result

STUDY_FILE = "study.yaml"


@dataclass(frozen=True)
class RunDir:
    """Reads (and, before the run, writes) the files a run consists of."""

    path: Path

    def write_config(self, config: dict[str, Any]) -> None:
        if not (self.path / "config.yaml").exists():
            write_atomic(
                self.path / "config.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
            )

    def result(self) -> dict[str, Any] | None:
        return read_result(self.path)

    @property
    def is_finished(self) -> bool:
        result = self.result()
        return result is not None and result.get("status") == "finished"

    def write_failure(self, error: str) -> None:
        """For a worker that died without a word."""
        write_json(self.path / "result.json", {"status": "failed", "error": error})

    def clear_failure(self) -> None:
        """A run that failed is tried again, from its last good checkpoint."""
        if not self.is_finished:
            (self.path / "result.json").unlink(missing_ok=True)

    def delete_model(self) -> None:
        """Let go of weights that nobody will look at: of runs that only measured or tuned."""
        shutil.rmtree(self.path / "model", ignore_errors=True)

    def metrics(self) -> dict[str, list[dict[str, Any]]]:
        """The rows of metrics.jsonl by kind, in order of steps, each step once."""
        try:
            text = (self.path / "metrics.jsonl").read_bytes()
        except FileNotFoundError:
            return {}
        kinds: dict[str, dict[int, dict[str, Any]]] = {}
        for line in text.split(b"\n"):
            row = parse_metrics_row(line)
            if row is not None:
                kinds.setdefault(row["kind"], {})[row["step"]] = row
        return {kind: [rows[step] for step in sorted(rows)] for kind, rows in kinds.items()}

    def last_log_line(self) -> str:
        """The last line the worker said; what a failure usually explains itself with."""
        try:
            with open(self.path / "log.txt", "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 8192))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def parse_metrics_row(line: bytes) -> dict[str, Any] | None:
    """One row of metrics.jsonl; None for a line cut short by a kill."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    usable = isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("kind"), str)
    return row if usable else None


@dataclass(frozen=True)
class StudyDir:
    path: Path

    def run_dir(self, run_id: str) -> RunDir:
        return RunDir(self.path / "runs" / run_id)

    def load(self) -> dict[str, Any]:
        """What `study.yaml` says."""
        try:
            text = (self.path / STUDY_FILE).read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            raise InputError(
                f"{self.path} is not a comparison: it has no {STUDY_FILE}; give the folder that "
                f"`qkflow compare --out` wrote"
            ) from None
        except UnicodeDecodeError:
            raise InputError(f"{self.path / STUDY_FILE} is not a text file") from None
        try:
            study = yaml.safe_load(text)
        except yaml.YAMLError as error:
            said = " ".join(str(error).split())
            raise InputError(f"{self.path / STUDY_FILE} cannot be read as YAML ({said})") from None
        kinds = {"config": dict, "arms": list, "runs": list}
        if not isinstance(study, dict) or any(not isinstance(study.get(k), kinds[k]) for k in kinds):
            raise InputError(f"{self.path / STUDY_FILE} is not what `qkflow compare` writes")
        return study

    def save(self, study: dict[str, Any]) -> None:
        write_atomic(self.path / STUDY_FILE, yaml.safe_dump(study, sort_keys=False, allow_unicode=True))

    @property
    def exists(self) -> bool:
        return (self.path / STUDY_FILE).is_file()

    def check_usable(self) -> None:
        """Refuse a folder that holds something else; writes nothing."""
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"--out {self.path} is a file; give a folder")
        if not self.exists and self.path.is_dir() and any(p.name != ".lock" for p in self.path.iterdir()):
            raise InputError(f"--out {self.path} holds something else; give a new or empty folder")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder, made if need be, so that two comparisons never write into one."""
        from filelock import FileLock, Timeout

        make_folder(self.path)
        lock = FileLock(self.path / ".lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise InputError(
                f"another comparison is at work in {self.path}; wait for it or give another --out"
            ) from None
        try:
            yield
        finally:
            lock.release()
