"""The server of `qkflow compare --live`: a process of its own that ends with the study."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qkflow import console

END_TIMEOUT = 15.0  # seconds for open pages to receive the final report


@contextmanager
def live_server(folder: Path, open_browser: bool = True) -> Iterator[subprocess.Popen[str] | None]:
    """Serve the report of a study while the body runs. A server that fails is reported, never raised."""
    process = _start(folder, open_browser)
    if process is None:
        yield None
        return
    threading.Thread(target=_announce, args=(process,), daemon=True).start()
    try:
        yield process
    finally:
        _end(process)


def _start(folder: Path, open_browser: bool) -> subprocess.Popen[str] | None:
    command = [sys.executable, "-m", "qkflow.report.watch", str(folder)]
    if not open_browser:
        command.append("--no-browser")
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C stops the study; the study then ends the server
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    except OSError as error:
        console.err.print(f"! the live report cannot be started ({error})", markup=False, style="yellow")
        return None


def _announce(process: subprocess.Popen[str]) -> None:
    """Print the address of the server, or that it has none."""
    assert process.stdout is not None
    line = process.stdout.readline()
    try:
        url = json.loads(line)["url"]
    except (ValueError, KeyError, TypeError):
        message = "! the live report could not be started; the study is not affected"
        console.err.print(message, markup=False, style="yellow")
        return
    console.err.print(f"live report: {url}", markup=False, highlight=False, soft_wrap=True)


def _end(process: subprocess.Popen[str]) -> None:
    """Close the server's stdin, which ends it once open pages have the final report."""
    with contextlib.suppress(OSError):
        assert process.stdin is not None
        process.stdin.close()
    try:
        process.wait(END_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
