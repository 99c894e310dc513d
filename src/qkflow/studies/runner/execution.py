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
from qkflow.studies.grid import Run
from qkflow.studies.runner.engines import BAD_INPUT, BUSY, INTERRUPTED, LOST, Engine, Handle
from qkflow.studies.runner.live import Board
from qkflow.studies.runner.study_dir import RunFolder, StudyFolder, read_row

TICK = 0.2  # seconds between looks at the workers
GRACE = 60.0  # seconds a worker has to save its state when asked to stop


class Stopped(KeyboardInterrupt):
    """The user asked to stop; the workers have saved their state."""


@dataclass
class Watched:
    """A run and what is known of it while it goes."""

    run: Run
    folder: RunFolder
    state: str = "waiting"  # waiting | running | finished | reused | failed | interrupted
    step: int = 0
    tokens: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    message: str = ""
    wall_seconds: float | None = None
    _began: float = 0.0
    _read: int = 0
    _rest: bytes = field(default=b"", repr=False)

    @property
    def over(self) -> bool:
        return self.state not in ("waiting", "running")

    def begin(self) -> None:
        self.state, self._began = "running", time.monotonic()

    def time_left(self) -> float | None:
        if not self.tokens_per_second:
            return None
        return max(0, self.run.tokens - self.tokens) / self.tokens_per_second

    def look(self) -> None:
        """Read what the worker has appended since the last look."""
        try:
            with open(self.folder.path / "metrics.jsonl", "rb") as file:
                file.seek(self._read)
                new = file.read()
        except FileNotFoundError:
            return
        self._read += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        for row in filter(None, map(read_row, lines)):
            if row["kind"] not in ("train", "eval"):
                continue
            self.step, self.tokens = row["step"], int(row.get("tokens", self.tokens))
            loss, pace = row.get("loss"), row.get("tokens_per_second")
            if isinstance(loss, int | float) and math.isfinite(loss):
                self.loss = loss
            if isinstance(pace, int | float) and pace > 0:
                self.tokens_per_second = pace

    def end(self, code: int) -> None:
        """Settle what became of it, from the exit code and the files it left."""
        self.look()
        self.wall_seconds = time.monotonic() - self._began
        result = self.folder.result()
        if code == 0 and result and result.get("status") == "finished":
            self.state, self.step, self.tokens = "finished", self.run.steps, self.run.tokens
            self.loss = result.get("loss", self.loss)
        elif code == INTERRUPTED:
            self.state, self.message = "interrupted", "stopped, its state is saved"
        else:
            self.state = "failed"
            said = (result or {}).get("error") or self.folder.last_words()
            self.message = (
                f"killed by signal {-code}" if LOST < code < 0 else str(said or f"exit code {code}")
            )
            if code == LOST:
                self.message = "its machine was lost"
            if result is None:
                self.folder.write_failure(self.message)


def execute(
    title: str, runs: Sequence[Run], study: StudyFolder, engine: Engine, jobs: int | None = None
) -> list[Watched]:
    """Run everything that is not finished yet, `jobs` at a time, in the order given."""
    watched = [Watched(run, study.run(run.id)) for run in runs]
    for one in watched:
        if one.folder.finished:
            one.state, one.step, one.tokens = "reused", one.run.steps, one.run.tokens
            one.loss = (one.folder.result() or {}).get("loss")
        else:
            one.look()  # where an interrupted run will go on from
    queue = deque(one for one in watched if not one.over)
    if queue:
        with _stoppable(), Board(title, watched) as board:
            _work(queue, board, engine, jobs or engine.jobs())
    return watched


def _work(queue: deque[Watched], board: Board, engine: Engine, jobs: int) -> None:
    working: dict[int, tuple[Watched, Handle]] = {}  # by slot
    try:
        while queue or working:
            for slot in range(jobs):
                if slot not in working and queue:
                    one = queue.popleft()
                    if one.folder.finished:  # meanwhile, by the orphan that kept it busy
                        one.end(0)
                        continue
                    one.folder.write_config(one.run.config)
                    one.folder.forget_failure()
                    working[slot] = one, engine.start(one.folder.path, slot)
                    one.begin()
            for slot, (one, handle) in list(working.items()):
                one.look()
                code = handle.poll()
                if code is None:
                    continue
                del working[slot]
                if code == BUSY:  # an orphan of a comparison that was killed: come back to it later
                    one.state = "waiting"
                    queue.append(one)
                    continue
                one.end(code)
                if code == BAD_INPUT:
                    raise InputError(f"{one.run.cell}: {one.message.removeprefix('qkflow: ')}")
            board.show()
            time.sleep(TICK)
    except KeyboardInterrupt:
        _stop(working)
        raise Stopped from None
    finally:
        for _, handle in working.values():
            handle.kill()


def _stop(working: dict[int, tuple[Watched, Handle]]) -> None:
    """Ask every worker to save and leave; those still working when this returns are killed by the caller."""
    err.print(f"stopping: {len(working)} runs save their state (Ctrl-C again to stop at once)")
    deadline = time.monotonic() + GRACE
    try:
        for _, handle in working.values():
            handle.stop()
        while working and time.monotonic() < deadline:
            for slot, (_, handle) in list(working.items()):
                if handle.poll() is not None:
                    del working[slot]
            time.sleep(TICK / 4)
    except KeyboardInterrupt:
        return


@contextmanager
def _stoppable() -> Iterator[None]:
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
