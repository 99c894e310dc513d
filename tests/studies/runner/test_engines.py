from __future__ import annotations

import sys
import time
from pathlib import Path

from qkflow.studies.runner.engines import RUN_LOCKED, LocalEngine
from qkflow.studies.runner.study_dir import RunDir


def test_locked_run_is_not_started(tmp_path: Path) -> None:
    engine = LocalEngine((sys.executable, "-c", "import time; time.sleep(30)"))
    first = engine.start(tmp_path, 0)
    assert engine.start(tmp_path, 1).poll() == RUN_LOCKED
    first.kill()
    third = engine.start(tmp_path, 0)
    assert third.poll() is None
    third.kill()


def test_worker_thread_count(tmp_path: Path) -> None:
    code = "import os; print(os.environ['OMP_NUM_THREADS'], os.environ['MKL_NUM_THREADS'])"
    handle = LocalEngine((sys.executable, "-c", code), threads=3).start(tmp_path, 0)
    while handle.poll() is None:
        time.sleep(0.02)
    assert RunDir(tmp_path).last_log_line() == "3 3"
