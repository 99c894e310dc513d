"""The progress of a study as its folder shows it: the study may run in another process or on a cluster."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from qkflow.config_io import dataclass_from_dict
from qkflow.errors import InputError
from qkflow.studies.plan import PlannedRun
from qkflow.studies.runner.study_dir import LOG_FILE, STUDY_FILE, RunDir, StudyDir
from qkflow.training.metrics_log import MetricsTail
from qkflow.training.run_dir import METRICS_FILE, RESULT_FILE, RUN_CONFIG_FILE

FolderStatus = Literal["waiting", "running", "silent", "finished", "failed"]
SILENT_AFTER = 180.0  # seconds without a change in the folder of a run that has not ended
MAX_POINTS = 200  # of a live curve


@dataclass
class RunProgress:
    """One run as its folder shows it. A run is silent if nothing has changed for a while: was it stopped?"""

    planned: PlannedRun
    run_dir: RunDir
    status: FolderStatus = "waiting"
    tokens: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    error: str = ""
    curve: list[tuple[int, float]] = field(default_factory=list, repr=False)  # tokens, training loss
    _metrics: MetricsTail = field(init=False, repr=False)
    _changed: float | None = field(default=None, repr=False)  # time stamp of the last change
    _changed_at: float = field(default=0.0, repr=False)  # on the monotonic clock of this process

    def __post_init__(self) -> None:
        self._metrics = MetricsTail(self.run_dir.path / METRICS_FILE)

    @property
    def has_ended(self) -> bool:
        return self.status in ("finished", "failed")

    def update(self, now: float) -> None:
        """Read the folder; `now` is on the monotonic clock, since time stamps and the clock may jump."""
        if self.status == "finished":
            return
        changed = _last_change(self.run_dir.path)
        if changed is None:
            self.status = "waiting"
            return
        if changed != self._changed:
            age = max(0.0, time.time() - changed) if self._changed is None else 0.0
            self._changed, self._changed_at = changed, now - age
        self._read_metrics()
        result = self.run_dir.result()
        if result is None:
            self.status = "running" if now - self._changed_at < SILENT_AFTER else "silent"
        elif result.get("status") == "finished":
            self.status, self.tokens = "finished", self.planned.tokens
            self.loss = result.get("loss", self.loss)
        else:
            self.status, self.error = "failed", str(result.get("error") or self.run_dir.last_log_line())

    def _read_metrics(self) -> None:
        for row in self._metrics.read_new():
            if row["kind"] not in ("train", "eval"):
                continue
            tokens, loss, speed = row.get("tokens"), row.get("loss"), row.get("tokens_per_second")
            if isinstance(tokens, int):
                if self.curve and tokens < self.tokens:  # the worker resumed from a checkpoint
                    self.curve = [point for point in self.curve if point[0] < tokens]
                self.tokens = tokens
            if isinstance(loss, int | float) and math.isfinite(loss):
                self.loss = loss
                if row["kind"] == "train":
                    self.curve.append((self.tokens, loss))
            if isinstance(speed, int | float) and speed > 0:
                self.tokens_per_second = speed

    def to_dict(self) -> dict[str, Any]:
        left = max(0, self.planned.tokens - self.tokens)
        return {
            "cell": self.planned.cell,
            "phase": self.planned.phase,
            "seed": self.planned.seed,
            "status": self.status,
            "share": min(1.0, self.tokens / self.planned.tokens) if self.planned.tokens else 0.0,
            "loss": self.loss if self.loss is None or math.isfinite(self.loss) else None,
            "tokens_per_second": self.tokens_per_second,
            "seconds_left": left / self.tokens_per_second if self.tokens_per_second else None,
            "error": self.error,
        }

    def live_curve(self) -> dict[str, Any]:
        stride = -(-len(self.curve) // MAX_POINTS) or 1
        points = [*self.curve[:-1:stride], *self.curve[-1:]]
        name = f"{self.planned.cell}, seed {self.planned.seed}"
        return {"name": name, "x": [point[0] for point in points], "y": [point[1] for point in points]}


class StudyProgress:
    """All runs of a study; `update` reads what has changed."""

    def __init__(self, folder: Path) -> None:
        self.study_dir = StudyDir(folder)
        self.runs: dict[str, RunProgress] = {}
        self._plan_changed = 0.0

    def update(self, now: float | None = None) -> None:
        """Read the folder. Raise InputError if it is not a study, or not yet."""
        now = time.monotonic() if now is None else now
        changed = _mtime(self.study_dir.path / STUDY_FILE)
        if changed is None or changed != self._plan_changed:
            self._read_plan()
            self._plan_changed = changed or 0.0
        for run in self.runs.values():
            run.update(now)

    def _read_plan(self) -> None:
        runs: dict[str, RunProgress] = {}
        for values in self.study_dir.load()["runs"]:
            try:
                planned = dataclass_from_dict(PlannedRun, values, "runs")
            except (InputError, TypeError) as error:
                raise InputError(
                    f"{self.study_dir.path / STUDY_FILE}: {error}", code="corrupt-study"
                ) from None
            known = self.runs.get(planned.id)
            runs[planned.id] = known or RunProgress(planned, self.study_dir.run_dir(planned.id))
        self.runs = runs

    @property
    def results_key(self) -> tuple[Any, ...]:
        """What changes when there is something new to judge: the plan, or a run that has ended."""
        ended = tuple((run.planned.id, run.status) for run in self.runs.values() if run.has_ended)
        return (self._plan_changed, ended)

    def seconds_left(self) -> float | None:
        """Return the time for all planned runs at the present speed; None if no run is training."""
        left = sum(max(0, run.planned.tokens - run.tokens) for run in self.runs.values() if not run.has_ended)
        speeds = [run.tokens_per_second or 0.0 for run in self.runs.values() if run.status == "running"]
        if left == 0:
            return 0.0
        return left / sum(speeds) if sum(speeds) else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a page: counts, time left, and the runs that a reader looks for."""
        runs = list(self.runs.values())
        total = sum(run.planned.tokens for run in runs)
        done = sum(run.planned.tokens if run.has_ended else run.tokens for run in runs)
        active = [run for run in runs if run.status in ("running", "silent")]
        return {
            "planned": len(runs),
            "counts": dict(Counter(run.status for run in runs)),
            "share": done / total if total else 0.0,
            "seconds_left": self.seconds_left(),
            "active": [run.to_dict() for run in active],
            "failed": [run.to_dict() for run in runs if run.status == "failed"],
            "curves": [run.live_curve() for run in active if run.curve],
        }


def _last_change(path: Path) -> float | None:
    """Return when a run's folder last changed; None if the run has not been started."""
    times = [_mtime(path / name) for name in (RUN_CONFIG_FILE, METRICS_FILE, LOG_FILE, RESULT_FILE)]
    return max((each for each in times if each is not None), default=None)


def _mtime(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
