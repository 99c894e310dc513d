"""The metrics of a run: `metrics.jsonl`, and copies to TensorBoard, Trackio or Weights & Biases."""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from qkflow import files
from qkflow.errors import InputError
from qkflow.plain_data import MAX_LOG_BYTES, MAX_NUMBER, is_number, load_json, open_regular, read_bytes
from qkflow.training.run_dir import METRICS_FILE

MetricsRow = dict[str, Any]


class MetricsWriter(Protocol):
    """A destination that receives every row in addition to `metrics.jsonl`."""

    def write(self, row: MetricsRow) -> None: ...
    def close(self) -> None: ...


class MetricsLog:
    """Appends rows to the `metrics.jsonl` of a run that resumes after `resume_step`."""

    def __init__(
        self, folder: Path, resume_step: int, writers: tuple[str, ...] = (), config: MetricsRow | None = None
    ) -> None:
        self._writers = [WRITERS[name](folder, config or {}) for name in writers]
        path = folder / METRICS_FILE
        # Steps after the last checkpoint of a killed process are repeated: drop their rows.
        kept = [row for row in read_rows(path) if row["step"] <= resume_step] if resume_step else []
        files.write_atomic(path, "".join(map(_to_json_line, kept)))
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def write(self, row: MetricsRow) -> None:
        row = {key: _nan_to_none(value) for key, value in row.items()}
        self._file.write(_to_json_line(row))
        self._file.flush()
        for writer in self._writers:
            writer.write(row)

    def sync(self) -> None:
        """Make all rows durable; called before a checkpoint of the same step."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        try:
            self._file.close()
        finally:
            for writer in self._writers:
                writer.close()


def parse_row(line: bytes) -> MetricsRow | None:
    """Return one row of `metrics.jsonl`; None for a line that a killed process left incomplete."""
    try:
        row = load_json(line.decode())
    except (ValueError, RecursionError):
        return None
    is_valid = isinstance(row, dict) and type(row.get("step")) is int and isinstance(row.get("kind"), str)
    return plain_row(row) if is_valid and 0 <= row["step"] <= MAX_NUMBER else None


def plain_row(row: MetricsRow) -> MetricsRow:
    """Return a row without the values that no measurement has: text, mappings, numbers beyond all use."""
    return {key: value for key, value in row.items() if key == "kind" or _is_measurement(value)}


def _is_measurement(value: Any) -> bool:
    if isinstance(value, list):
        return all(is_number(item, or_none=True) for item in value)
    return is_number(value, or_none=True)


def read_rows(path: Path) -> list[MetricsRow]:
    """Return all complete rows of a `metrics.jsonl`; an empty list if there is no file."""
    try:
        lines = read_bytes(path, MAX_LOG_BYTES).split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [row for line in lines if (row := parse_row(line)) is not None]


class MetricsTail:
    """Reads the rows that a worker, in this or another process, has appended since the last call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode, self._offset, self._partial_line = 0, 0, b""

    def read_new(self) -> list[MetricsRow]:
        """Return the new rows; all rows again, if the file was replaced by a worker that resumes."""
        try:
            with open_regular(self.path) as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode, self._offset, self._partial_line = status.st_ino, 0, b""
                file.seek(self._offset)
                new = file.read(MAX_LOG_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return []
        self._offset += len(new)
        *lines, self._partial_line = (self._partial_line + new).split(b"\n")
        return [row for line in lines if (row := parse_row(line)) is not None]


def read_rows_by_kind(path: Path) -> dict[str, list[MetricsRow]]:
    """Return rows by kind in order of steps; of several rows for one step, the last."""
    kinds: dict[str, dict[int, MetricsRow]] = {}
    for row in read_rows(path):
        kinds.setdefault(row["kind"], {})[row["step"]] = row
    return {kind: [rows[step] for step in sorted(rows)] for kind, rows in kinds.items()}


def _to_json_line(row: MetricsRow) -> str:
    return json.dumps(row, separators=(",", ":"), allow_nan=False) + "\n"


def _nan_to_none(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have."""
    if isinstance(value, list):
        return [_nan_to_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def scalars(row: MetricsRow) -> dict[str, float]:
    """Return the numbers of a row as `kind/name`; a list is averaged."""
    result: dict[str, float] = {}
    for key, value in row.items():
        values = [v for v in value if v is not None] if isinstance(value, list) else [value]
        if key not in ("kind", "step") and values and all(isinstance(v, int | float) for v in values):
            result[f"{row['kind']}/{key}"] = sum(values) / len(values)
    return result


def check_writers(names: Iterable[str]) -> None:
    """Raise InputError for a writer whose package, which has the same name, is not installed."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            raise InputError(
                f"the metrics writer '{name}' is not installed: pip install \"qkflow[{name}]\"",
                code="writer-not-installed",
            ) from None


class TensorBoardWriter:
    def __init__(self, folder: Path, config: MetricsRow) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def write(self, row: MetricsRow) -> None:
        for name, value in scalars(row).items():
            self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()


class _TrackerWriter:
    """Base class for Trackio and W&B, which have the same API."""

    name: str

    def __init__(self, folder: Path, config: MetricsRow) -> None:
        self._module = importlib.import_module(self.name)
        self._module.init(project="qkflow", name=folder.resolve().name, config=config)

    def write(self, row: MetricsRow) -> None:
        self._module.log(scalars(row), step=row["step"])

    def close(self) -> None:
        self._module.finish()


class TrackioWriter(_TrackerWriter):
    name = "trackio"


class WandbWriter(_TrackerWriter):
    name = "wandb"


WRITERS: dict[str, type[TensorBoardWriter | TrackioWriter | WandbWriter]] = {
    "tensorboard": TensorBoardWriter,
    "trackio": TrackioWriter,
    "wandb": WandbWriter,
}
