"""Run one case in this process, through `main` with its real handling of errors, and check how it ends."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn
from unittest import mock

from fuzz_files import apply_mutation, copy_item
from fuzz_grammar import Case
from fuzz_world import ALWAYS_COPIED, in_process_workers

SECONDS = 20  # a case that takes longer hangs
EXIT_CODES = {0, 2}
EXIT_CODES_OF_STUDIES = {0, 1, 2}  # 1: a run has failed, or has not finished
STUDY_COMMANDS = ("compare", "report", "reproduce", "pace", "train")
REFUSAL = re.compile(r"qkflow: .+ \[[a-z0-9-]+\]")
CONTROLS = re.compile("[\x07\x08\x1b\x9b]")
LEFTOVER = re.compile(r"\.part$|\.tmp$|^tmp|\.incomplete$")


class Hang(BaseException):
    """The case takes longer than SECONDS."""


@dataclass(frozen=True)
class Outcome:
    """How a case ended. `problem` is empty if that is as it should be; `where` groups equal problems."""

    kind: str  # success, refusal, traceback, hang, leftover, orphan, exit-code, output
    problem: str = ""
    where: str = ""
    code: int | None = None
    out: str = ""
    err: str = ""


def run_case(case: Case, world: Path) -> Outcome:
    """Run a case in a fresh folder."""
    place = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        _prepare(case, world, place)
        before = set(_paths(place))
        with _process_state(case, place), in_process_workers() if case.mutations else nullcontext():
            outcome = _call(case)
        return _check(case, place, before, outcome)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def case_to_json(case: Case) -> str:
    """Return a case as a line that `python tests/fuzz/run_fuzz.py --case` repeats."""
    return json.dumps(asdict(case))


def case_from_json(text: str) -> Case:
    values = json.loads(text)
    return Case(values["argv"], [tuple(each) for each in values["mutations"]], values["environment"])


def _prepare(case: Case, world: Path, place: Path) -> None:
    (place / "tmp").mkdir()
    os.mkfifo(place / "pipe")
    for word in (*case.argv, *ALWAYS_COPIED, *(path for path, _, _ in case.mutations)):
        item = word.partition("#")[0].partition("/")[0]
        if item and item not in (".", "..", "tmp") and "\0" not in item and len(item) < 200:
            with suppress(OSError, UnicodeError):
                if (world / item).exists():
                    copy_item(world / item, place / item)
    for path, operator, seed in case.mutations:
        apply_mutation(place, path, operator, seed)


@contextmanager
def _process_state(case: Case, place: Path) -> Iterator[None]:
    """Set what a process has of its own (folder, environment, threads) and restore it."""
    import torch

    here = os.getcwd()
    environment = {
        "QKFLOW_CACHE": str(place / "cache"),
        "TMPDIR": str(place / "tmp"),
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(place / "hf-home"),
        **case.environment,
    }
    os.chdir(place)
    tempfile.tempdir = None
    with mock.patch.dict(os.environ, environment), mock.patch("qkflow.web.security.serve", _visit):
        try:
            yield
        finally:
            tempfile.tempdir = None
            os.chdir(here)
            torch.set_num_threads(1)
            torch.set_flush_denormal(False)


def _visit(app: Any, site: Any, *, open_browser: bool = False, on_ready: Any = None) -> None:
    """Stand in for the server that runs until Ctrl-C: request what a page requests, then return."""
    from starlette.testclient import TestClient

    try:
        if on_ready is not None:
            on_ready()
        site.stopping.set()  # streams end after the first events
        client = TestClient(app, base_url=f"http://{site.hosts[0]}", raise_server_exceptions=True)
        client.cookies.set(site.cookie_name, site.token)
        for path in ("/", "/events", "/api/models"):
            client.get(path)
    finally:
        site.socket.close()


def _call(case: Case) -> Outcome:
    from qkflow.cli import main

    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    previous = signal.signal(signal.SIGALRM, _Alarm())
    signal.alarm(SECONDS)
    try:
        with (
            mock.patch.object(sys, "argv", ["qkflow", *case.argv]),
            mock.patch.object(sys, "stdin", io.StringIO()),
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            main.main()
        return Outcome("exit-code", "main returned", "main")
    except SystemExit as exited:
        code = exited.code if isinstance(exited.code, int) else 0 if exited.code is None else 1
        kind = "success" if code == 0 else "refusal"
        printed = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
        return Outcome(kind, "", "", code, *printed)
    except Hang as error:
        return Outcome("hang", f"no end after {SECONDS} s", _location(error))
    except BaseException as error:
        signal.alarm(0)
        return Outcome("traceback", "".join(traceback.format_exception(error)), _location(error))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


class _Alarm:
    """Raise Hang after SECONDS of CPU time, or of waiting. Other load on the machine does not count."""

    def __init__(self) -> None:
        self.start = self.last = time.process_time()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.process_time()
        waiting, self.last = now - self.last < 0.02, now
        if not waiting and now - self.start < SECONDS:
            signal.alarm(SECONDS)
            return
        signal.alarm(2)  # again, if this one is swallowed
        raise Hang


def _location(error: BaseException) -> str:
    """Return the last line of qkflow in the traceback, and the type of the error."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/qkflow/" in frame.filename]
    place = f"{frames[-1].filename.partition('/qkflow/')[2]}:{frames[-1].name}" if frames else "?"
    return f"{place} {type(error).__name__}"


def _check(case: Case, place: Path, before: set[str], outcome: Outcome) -> Outcome:
    """Return the outcome, or the problem with what the case printed and left behind."""
    if outcome.kind not in ("success", "refusal"):
        return outcome
    command = next((word for word in case.argv if not word.startswith("-")), "")
    codes = EXIT_CODES_OF_STUDIES if command in STUDY_COMMANDS else EXIT_CODES
    lines = outcome.err.strip().splitlines()
    if outcome.code not in codes:
        return Outcome(
            "exit-code", f"exit code {outcome.code}: {outcome.err[-300:]}", f"{command} {outcome.code}"
        )
    if "Traceback (most recent call last)" in outcome.err + outcome.out:
        return Outcome("traceback", outcome.err[-3000:], lines[-1][:80])
    boxed = lines and lines[-1].startswith("╰")  # tyro's own message for a wrong option
    if outcome.code == 2 and not (lines and (REFUSAL.fullmatch(lines[-1]) or boxed)):
        return Outcome("output", f"refused without a sentence: {outcome.err[-500:]}", f"{command} refusal")
    if outcome.code == 0 and "--json" in case.argv and not _is_json(outcome.out):
        return Outcome("output", f"not one JSON object: {outcome.out[:300]}", f"{command} json")
    # stdout is no terminal, so none is a color; what a model generates is written as it is
    if command != "generate" and CONTROLS.search(outcome.out):
        return Outcome("output", f"control characters: {outcome.out[-300:]!r}", f"{command} controls")
    left = sorted(
        path for path in set(_paths(place)) - before if LEFTOVER.search(Path(path).name) and path != "tmp"
    )
    left += sorted(path for path in _paths(place) if re.match(r"tmp/(?!torchinductor)", path))
    if left:
        return Outcome("leftover", f"left behind: {left[:5]}", f"{command} {Path(left[0]).name[-12:]}")
    if children := _children():
        return Outcome("orphan", f"still running: {children}", command)
    return outcome


def _is_json(text: str) -> bool:
    def refuse(name: str) -> NoReturn:
        raise ValueError(name)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return "usage:" in text or text.startswith("qkflow ")
    return True


def _children() -> list[str]:
    import psutil

    return [
        " ".join(child.cmdline())[:200]
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE
    ]


def _paths(place: Path) -> list[str]:
    found = []
    for folder, folders, files in os.walk(place):
        found += [os.path.relpath(os.path.join(folder, name), place) for name in (*folders, *files)]
    return found


def no_network() -> None:
    """Refuse every connection that does not stay on this machine."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1"):
            raise OSError(101, "Network is unreachable")
        return connect(self, address)

    socket.socket.connect = guarded  # type: ignore[method-assign]
