"""Execute a list of runs: a queue with a few workers at a time. Finished runs are skipped, others resume."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from types import FrameType
from typing import Literal

from qkflow.console import err
from qkflow.errors import InputError
from qkflow.studies.grid import RunSpec
from qkflow.studies.runner.engines import RUN_LOCKED, WORKER_LOST, Engine, Retries, WorkerHandle
from qkflow.studies.runner.live import LiveTable, format_duration
from qkflow.studies.runner.study_dir import RunDir, StudyDir
from qkflow.system import handle_signals, termination_signals
from qkflow.training.metrics_log import MetricsTail
from qkflow.training.run_dir import (
    EXIT_BAD_INPUT,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_LOCKED,
    METRICS_FILE,
)

POLL_INTERVAL = 0.2  # seconds, for workers without a sentinel
REFRESH_INTERVAL = 0.5  # seconds; rendering the table takes CPU time from the workers
SHUTDOWN_TIMEOUT = 60.0  # seconds for workers to save their state

RunStatus = Literal["waiting", "running", "finished", "reused", "failed", "interrupted"]


class StudyInterrupted(KeyboardInterrupt):
    """The user interrupted a study; its workers have saved their state."""


@dataclass
class RunTracker:
    """The state of one run during execution."""

    spec: RunSpec
    run_dir: RunDir
    status: RunStatus = "waiting"
    step: int = 0
    tokens: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    message: str = ""
    wall_seconds: float | None = None
    train_seconds: float = 0.0  # in optimizer steps, over all resumes
    times_lost: int = 0
    times_failed: int = 0
    _start_time: float = 0.0
    _start_train_seconds: float = 0.0
    _metrics: MetricsTail = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._metrics = MetricsTail(self.run_dir.path / METRICS_FILE)

    @property
    def is_done(self) -> bool:
        return self.status not in ("waiting", "running")

    def mark_running(self) -> None:
        self.status, self._start_time = "running", time.monotonic()
        self._start_train_seconds = self.train_seconds

    def new_train_seconds(self) -> float:
        """Return the seconds in optimizer steps since the worker was started; 0 for a reused run."""
        return max(0.0, self.train_seconds - self._start_train_seconds) if self._start_time else 0.0

    def mark_reused(self) -> None:
        self.status, self.step, self.tokens = "reused", self.spec.steps, self.spec.tokens
        self.loss = (self.run_dir.result() or {}).get("loss")

    def time_left(self) -> float | None:
        if not self.tokens_per_second:
            return None
        return max(0, self.spec.tokens - self.tokens) / self.tokens_per_second

    def read_new_metrics(self) -> None:
        """Read the rows that the worker has appended since the last call."""
        for row in self._metrics.read_new():
            if row["kind"] not in ("train", "eval"):
                continue
            self.step, self.tokens = row["step"], int(row.get("tokens", self.tokens))
            self.train_seconds = row.get("seconds", self.train_seconds)
            loss, speed = row.get("loss"), row.get("tokens_per_second")
            if isinstance(loss, int | float) and math.isfinite(loss):
                self.loss = loss
            if isinstance(speed, int | float) and speed > 0:
                self.tokens_per_second = speed

    def count_retry(self, exit_code: int, retries: Retries) -> bool:
        """Return whether to start the run again after this exit, and count it.

        A lost machine, or one that has stopped its worker, says nothing about the run. A program that has
        failed is likely to fail again.
        """
        if exit_code in (EXIT_BAD_INPUT, EXIT_FINISHED):
            return False
        if exit_code in (WORKER_LOST, EXIT_INTERRUPTED):
            self.times_lost += 1
            return self.times_lost <= retries.lost
        self.times_failed += 1
        return self.times_failed <= retries.failed

    def mark_exited(self, exit_code: int) -> None:
        """Set the final status from exit code and result.json; write result.json if the worker has not."""
        self.read_new_metrics()
        self.wall_seconds = time.monotonic() - self._start_time
        result = self.run_dir.result()
        if exit_code == EXIT_FINISHED and result and result.get("status") == "finished":
            self.status, self.step, self.tokens = "finished", self.spec.steps, self.spec.tokens
            self.loss = result.get("loss", self.loss)
            self.train_seconds = result.get("seconds", self.train_seconds)
        elif exit_code == EXIT_INTERRUPTED:
            self.status, self.message = "interrupted", "its state is saved"
        else:
            self.status, self.message = "failed", self._failure(exit_code)
            if result is None:
                with suppress(OSError):  # a full disk: the line of the run tells the reason
                    self.run_dir.write_failure(self.message)

    def _failure(self, exit_code: int) -> str:
        if exit_code == WORKER_LOST:
            return "its machine was lost"
        if exit_code == EXIT_BAD_INPUT:
            return str(self.input_error())
        if exit_code < 0:
            return f"killed by signal {-exit_code}"
        reported = (self.run_dir.result() or {}).get("error") or self.run_dir.last_log_line()
        return str(reported or f"exit code {exit_code}")

    def input_error(self) -> InputError:
        """Return the error of a worker that exited with EXIT_BAD_INPUT."""
        return InputError.from_line(self.run_dir.last_log_line())


@dataclass
class ExecutionTime:
    """Wall-clock time of executing runs, summed over calls of `execute_runs`, and its part in training."""

    jobs: int = 0  # runs at a time
    wall_seconds: float = 0.0
    slot_seconds: float = 0.0  # wall-clock time times runs at a time
    train_seconds: float = 0.0  # in optimizer steps, of all runs

    def add(self, jobs: int, wall_seconds: float, trackers: Sequence[RunTracker]) -> None:
        self.jobs = max(self.jobs, jobs)
        self.wall_seconds += wall_seconds
        self.slot_seconds += jobs * wall_seconds
        self.train_seconds += sum(tracker.new_train_seconds() for tracker in trackers)

    @property
    def train_share(self) -> float:
        """The share of the wall-clock in optimizer steps; the rest is start-up, evaluation and idling."""
        return self.train_seconds / self.slot_seconds if self.slot_seconds else 0.0

    def __str__(self) -> str:
        runs = "1 run" if self.jobs == 1 else f"{self.jobs} runs"
        elapsed = format_duration(self.wall_seconds)
        return f"optimizer steps: {self.train_share:.0%} of the wall-clock ({runs} at a time, {elapsed})"


def execute_runs(
    title: str,
    runs: Sequence[RunSpec],
    study_dir: StudyDir,
    engine: Engine,
    jobs: int | None = None,
    execution_time: ExecutionTime | None = None,
) -> list[RunTracker]:
    """Execute all runs that are not finished, `jobs` at a time, in order. Add to `execution_time`.

    Raise StudyInterrupted on Ctrl-C, SIGTERM or SIGHUP, once all workers have saved their state, and
    InputError if a worker rejects its config.
    """
    trackers = [RunTracker(run, study_dir.run_dir(run.id)) for run in runs]
    for tracker in trackers:
        if tracker.run_dir.is_finished:
            tracker.mark_reused()
        else:
            tracker.read_new_metrics()  # the progress of an interrupted run
    queue = deque(tracker for tracker in trackers if not tracker.is_done)
    if queue:
        slots = min(jobs or engine.default_jobs(), len(queue))
        start, n_started = time.monotonic(), len(queue) if engine.has_queue else slots
        with handle_signals(_interrupt, termination_signals()), LiveTable(title, trackers) as live_table:
            _run_queue(queue, live_table, engine, n_started)
        if execution_time is not None:
            execution_time.add(slots, time.monotonic() - start, trackers)
    return trackers


Active = dict[int, tuple[RunTracker, WorkerHandle]]  # by slot


def _run_queue(queue: deque[RunTracker], live_table: LiveTable, engine: Engine, jobs: int) -> None:
    active: Active = {}
    try:
        while queue or active:
            _start_runs(queue, active, engine, jobs)
            live_table.refresh()
            _wait_for_exit(active)
            _poll_runs(queue, active, engine.retries)
        live_table.refresh()
    except KeyboardInterrupt:
        if engine.has_queue:
            err.print(f"interrupted: {len(active)} jobs stay in the queue; the same command finds them again")
            active.clear()
        else:
            _stop_workers(active)
        raise StudyInterrupted from None
    finally:
        for _, handle in active.values():
            handle.kill()


def _start_runs(queue: deque[RunTracker], active: Active, engine: Engine, jobs: int) -> None:
    """Fill the free slots from the queue."""
    for slot in range(jobs):
        if slot in active or not queue:
            continue
        tracker = queue.popleft()
        if tracker.run_dir.is_finished:  # by a worker of an earlier study that held its lock
            tracker.mark_exited(EXIT_FINISHED)
            continue
        tracker.run_dir.write_config(tracker.spec.config)
        tracker.run_dir.clear_failure()
        active[slot] = tracker, engine.start(tracker.run_dir.path, slot)
        tracker.mark_running()


def _wait_for_exit(active: Active) -> None:
    """Wait until a worker has exited or the table is due; for POLL_INTERVAL if a worker has no sentinel."""
    sentinels = [handle.sentinel for _, handle in active.values() if handle.sentinel is not None]
    timeout = REFRESH_INTERVAL if len(sentinels) == len(active) else POLL_INTERVAL
    if sentinels:
        connection.wait(sentinels, timeout)
    else:
        time.sleep(timeout)


def _poll_runs(queue: deque[RunTracker], active: Active, retries: Retries) -> None:
    """Update every active run; remove those that have exited."""
    for slot, (tracker, handle) in list(active.items()):
        tracker.read_new_metrics()
        code = handle.poll()
        if code is None:
            continue
        del active[slot]
        # RUN_LOCKED: a worker of a killed study still trains this run
        if code in (RUN_LOCKED, EXIT_LOCKED) or tracker.count_retry(code, retries):
            tracker.status = "waiting"
            queue.append(tracker)
            continue
        tracker.mark_exited(code)
        if code == EXIT_BAD_INPUT:
            error = tracker.input_error()
            raise InputError(f"{tracker.spec.cell}: {error}", code=error.code)


def _stop_workers(active: Active) -> None:
    """Ask all workers to save their state and exit; the caller kills those that have not after a timeout."""
    err.print(f"interrupted: {len(active)} runs are saving their state (Ctrl-C again to stop at once)")
    deadline = time.monotonic() + SHUTDOWN_TIMEOUT
    try:
        for _, handle in active.values():
            handle.stop()
        while active and time.monotonic() < deadline:
            for slot, (_, handle) in list(active.items()):
                if handle.poll() is not None:
                    del active[slot]
            time.sleep(POLL_INTERVAL / 4)
    except KeyboardInterrupt:
        return


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
