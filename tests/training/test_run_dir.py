from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
import torch

from input_errors import raises_code
from qkflow.training.distributed import DistContext
from qkflow.training.run_dir import lock_run_dir, read_result, stop_signals, write_failure


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"status": "finis'])
def test_damaged_result_reads_as_none(tmp_path: Path, content: bytes) -> None:
    assert read_result(tmp_path) is None
    assert read_result(tmp_path / "missing") is None
    (tmp_path / "result.json").write_bytes(content)
    assert read_result(tmp_path) is None


def test_failure_is_read_back(tmp_path: Path) -> None:
    write_failure(tmp_path, "the loss is not finite")
    assert read_result(tmp_path) == {"status": "failed", "error": "the loss is not finite"}


def test_locked_run_dir_is_refused(tmp_path: Path) -> None:
    context = DistContext(torch.device("cpu"))
    with lock_run_dir(tmp_path, context), raises_code("folder-locked"), lock_run_dir(tmp_path, context):
        pass
    with lock_run_dir(tmp_path, context):
        pass


def test_second_signal_interrupts() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_signals() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_ignored_hangup_stays_ignored() -> None:
    """As under nohup, whose run must survive its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.is_set()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signals_are_left_alone_outside_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def check() -> None:
        with stop_signals():
            handlers.append(signal.getsignal(signal.SIGTERM))

    handlers: list[object] = []
    thread = threading.Thread(target=check)
    thread.start()
    thread.join()
    assert handlers == [before]
