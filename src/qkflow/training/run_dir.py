"""A run's process: alone in its folder, and asked politely to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType

from qkflow.files import lock_folder
from qkflow.training.distributed import DistContext


@contextmanager
def lock_run_dir(folder: Path, dist_context: DistContext) -> Iterator[None]:
    """Lock the run folder in the main process; two runs in one folder would overwrite each other."""
    with lock_folder(folder, ".worker.lock") if dist_context.is_main else nullcontext():
        yield


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event set by Ctrl-C or SIGTERM, for the run to save its state; asked twice, it stops at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
