"""What a run reports as it goes: `metrics.jsonl` is the truth, other writers are copies of it."""

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

METRICS_FILE = "metrics.jsonl"
MetricsRow = dict[str, Any]


class MetricsWriter(Protocol):
    """Another place that rows go to."""

    def write(self, row: MetricsRow) -> None: ...
    def close(self) -> None: ...


class MetricsLog:
    """Appends rows to a run's `metrics.jsonl`, going on after step `after`."""

    def __init__(
        self, folder: Path, resume_step: int, writers: tuple[str, ...] = (), config: MetricsRow | None = None
    ) -> None:
        self._writers = [WRITERS[name](folder, config or {}) for name in writers]
        path = folder / METRICS_FILE
        # Steps that a killed run made after its last checkpoint are made again: forget what it said of them.
        kept = [row for row in read_rows(path) if row["step"] <= resume_step] if resume_step else []
        files.write_atomic(path, "".join(map(_to_json_line, kept)))
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def write(self, row: MetricsRow) -> None:
        row = {key: _nan_to_none(value) for key, value in row.items()}
        self._file.write(_to_json_line(row))
        self._file.flush()
        for copy in self._writers:
            copy.write(row)

    def sync(self) -> None:
        """Make every row so far durable, before a checkpoint that stands after them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        for copy in self._writers:
            copy.close()


def read_rows(path: Path) -> list[MetricsRow]:
    """All whole rows; a line cut short by a kill is passed over."""
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def _to_json_line(row: MetricsRow) -> str:
    return json.dumps(row, separators=(",", ":"), allow_nan=False) + "\n"


def _nan_to_none(value: Any) -> Any:
    """JSON has no NaN: null stands for it."""
    if isinstance(value, list):
        return [_nan_to_none(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def scalars(row: MetricsRow) -> dict[str, float]:
    """The numbers of a row by name, `kind/name`, a list as its mean."""
    found: dict[str, float] = {}
    for key, value in row.items():
        values = [v for v in value if v is not None] if isinstance(value, list) else [value]
        if key not in ("kind", "step") and values and all(isinstance(v, int | float) for v in values):
            found[f"{row['kind']}/{key}"] = sum(values) / len(values)
    return found


def check_writers(names: Iterable[str]) -> None:
    """Every writer is called what its package is called."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            raise InputError(
                f"the metrics writer '{name}' is not installed: pip install \"qkflow[{name}]\""
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
    """Trackio and W&B, which share one interface."""

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
