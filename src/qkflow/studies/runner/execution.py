"""Runs a list of runs: a queue, a few workers at once, nothing repeated, everything resumable."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from qkflow.console import err
from qkflow.errors import InputError
from qkflow.studies.grid import RunSpec
from qkflow.studies.runner.engines import (
    EXIT_BAD_INPUT,
    EXIT_INTERRUPTED,
    RUN_LOCKED,
    WORKER_LOST,
    Engine,
    WorkerHandle,
)
from qkflow.studies.runner.live import LiveTable
from qkflow.studies.runner.study_dir import RunDir, StudyDir, parse_metrics_row

POLL_INTERVAL = 0.2  # seconds between looks at the workers
SHUTDOWN_TIMEOUT = 60.0  # seconds a worker has to save its state when asked to stop


class StudyInterrupted(KeyboardInterrupt):
    """The user asked to stop; the workers have saved their state."""


@dataclass
class RunTracker:
    """A run and what is known of it while it goes."""

    spec: RunSpec
    run_dir: RunDir
    status: str = "waiting"  # waiting | running | finished | reused | failed | interrupted
    step: int = 0
    tokens: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    message: str = ""
    wall_seconds: float | None = None
    _start_time: float = 0.0
    _read_offset: int = 0
    _partial_line: bytes = field(default=b"", repr=False)

    @property
    def is_done(self) -> bool:
        return self.status not in ("waiting", "running")

    def mark_running(self) -> None:
        self.status, self._start_time = "running", time.monotonic()

    def time_left(self) -> float | None:
        if not self.tokens_per_second:
            return None
        return max(0, self.spec.tokens - self.tokens) / self.tokens_per_second

    def read_new_metrics(self) -> None:
        """Read what the worker has appended since the last look."""
        try:
            with open(self.run_dir.path / "metrics.jsonl", "rb") as file:
                file.seek(self._read_offset)
                new = file.read()
        except FileNotFoundError:
            return
        self._read_offset += len(new)
        *lines, self._partial_line = (self._partial_line + new).split(b"\n")
        for row in filter(None, map(parse_metrics_row, lines)):
            if row["kind"] not in ("train", "eval"):
                continue
            self.step, self.tokens = row["step"], int(row.get("tokens", self.tokens))
            loss, pace = row.get("loss"), row.get("tokens_per_second")
            if isinstance(loss, int | float) and math.isfinite(loss):
                self.loss = loss
            if isinstance(pace, int | float) and pace > 0:
                self.tokens_per_second = pace

    def mark_exited(self, exit_code: int) -> None:
        """Settle what became of it, from the exit code and the files it left."""
        self.read_new_metrics()
        self.wall_seconds = time.monotonic() - self._start_time
        result = self.run_dir.result()
        if exit_code == 0 and result and result.get("status") == "finished":
            self.status, self.step, self.tokens = "finished", self.spec.steps, self.spec.tokens
            self.loss = result.get("loss", self.loss)
        elif exit_code == EXIT_INTERRUPTED:
            self.status, self.message = "interrupted", "stopped, its state is saved"
        else:
            self.status = "failed"
            said = (result or {}).get("error") or self.run_dir.last_log_line()
            self.message = (
                f"killed by signal {-exit_code}"
                if WORKER_LOST < exit_code < 0
                else str(said or f"exit code {exit_code}")
            )
            if exit_code == WORKER_LOST:
                self.message = "its machine was lost"
            if result is None:
                self.run_dir.write_failure(self.message)


def execute_runs(
    title: str, runs: Sequence[RunSpec], study_dir: StudyDir, engine: Engine, jobs: int | None = None
) -> list[RunTracker]:
    """Run everything that is not finished yet, `jobs` at a time, in the order given."""
    watched = [RunTracker(run, study_dir.run_dir(run.id)) for run in runs]
    for one in watched:
        if one.run_dir.is_finished:
            one.status, one.step, one.tokens = "reused", one.spec.steps, one.spec.tokens
            one.loss = (one.run_dir.result() or {}).get("loss")
        else:
            one.read_new_metrics()  # where an interrupted run will go on from
    queue = deque(one for one in watched if not one.is_done)
    if queue:
        with _sigterm_as_keyboard_interrupt(), LiveTable(title, watched) as board:
            _run_queue(queue, board, engine, jobs or engine.default_jobs())
    return watched


def _run_queue(queue: deque[RunTracker], live_table: LiveTable, engine: Engine, jobs: int) -> None:
    working: dict[int, tuple[RunTracker, WorkerHandle]] = {}  # by slot
    try:
        while queue or working:
            for slot in range(jobs):
                if slot not in working and queue:
                    one = queue.popleft()
                    if one.run_dir.is_finished:  # meanwhile, by the orphan that kept it busy
                        one.mark_exited(0)
                        continue
                    one.run_dir.write_config(one.spec.config)
                    one.run_dir.clear_failure()
                    working[slot] = one, engine.start(one.run_dir.path, slot)
                    one.mark_running()
            for slot, (one, handle) in list(working.items()):
                one.read_new_metrics()
                code = handle.poll()
                if code is None:
                    continue
                del working[slot]
                if code == RUN_LOCKED:  # an orphan of a comparison that was killed: come back to it later
                    one.status = "waiting"
                    queue.append(one)
                    continue
                one.mark_exited(code)
                if code == EXIT_BAD_INPUT:
                    raise InputError(f"{one.spec.cell}: {one.message.removeprefix('qkflow: ')}")
            live_table.refresh()
            time.sleep(POLL_INTERVAL)
    except KeyboardInterrupt:
        _stop_workers(working)
        raise StudyInterrupted from None
    finally:
        for _, handle in working.values():
            handle.kill()


def _stop_workers(active: dict[int, tuple[RunTracker, WorkerHandle]]) -> None:
    """Ask every worker to save and leave; those still working when this returns are killed by the caller."""
    err.print(f"stopping: {len(active)} runs save their state (Ctrl-C again to stop at once)")
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


@contextmanager
def _sigterm_as_keyboard_interrupt() -> Iterator[None]:
    """Let SIGTERM stop a study as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
