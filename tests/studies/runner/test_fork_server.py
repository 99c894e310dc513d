"""Workers that are forked from a server: the contract of a worker process, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from qkflow.errors import InputError
from qkflow.studies.runner import fork_server
from qkflow.studies.runner.engines import RUN_LOCKED, LocalEngine, WorkerHandle
from qkflow.studies.runner.study_dir import RunDir
from qkflow.training.run_dir import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_FINISHED, EXIT_INTERRUPTED

pytestmark = pytest.mark.skipif(
    not fork_server.is_supported() or not Path("/proc/self").exists(), reason="needs fork and /proc"
)
RunFolder = Callable[..., Path]
MARK = "QKFLOW_TEST_MARK"  # finds the processes of one study by their environment
LONG = {"steps": 100_000, "evaluations": 1, "probe_every": 0}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QKFLOW_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        engine = LocalEngine(device="cpu")
    yield engine
    engine.close()


def wait_for(condition: Callable[[], Any], timeout: float = 60) -> Any:
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


def exit_code(handle: WorkerHandle) -> int:
    wait_for(lambda: handle.poll() is not None)
    code = handle.poll()
    assert code is not None
    return code


def marked_processes(mark: str) -> list[int]:
    """Return the processes with this mark in their environment that are not zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return found


def has_trained(folder: Path) -> bool:
    return bool(RunDir(folder).metrics().get("train"))


def test_forked_worker_is_bit_identical_to_a_new_interpreter(
    engine: LocalEngine, run_folder: RunFolder
) -> None:
    model = {"attention": {"coupling": "euler"}}
    forked, started = run_folder("forked", model=model), run_folder("started", model=model)
    command = [sys.executable, "-m", "qkflow.training.worker", str(started)]
    assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode == EXIT_FINISHED
    assert exit_code(engine.start(forked, 0)) == EXIT_FINISHED
    weights = [(f / "model" / "model.safetensors").read_bytes() for f in (forked, started)]
    assert weights[0] == weights[1]
    results = [json.loads((f / "result.json").read_text()) for f in (forked, started)]
    assert results[0]["loss"] == results[1]["loss"]
    assert results[0]["environment"] == results[1]["environment"]
    assert "Warning" not in (forked / "log.txt").read_text()


def test_threads_are_set_before_openmp_is_loaded(run_folder: RunFolder) -> None:
    engine = LocalEngine(threads=2, device="cpu")
    try:
        folder = run_folder()
        assert exit_code(engine.start(folder, 0)) == EXIT_FINISHED
    finally:
        engine.close()
    assert json.loads((folder / "result.json").read_text())["environment"]["threads"] == 2


def test_server_has_one_thread_after_its_imports(engine: LocalEngine, run_folder: RunFolder) -> None:
    assert exit_code(engine.start(run_folder(), 0)) == EXIT_FINISHED
    assert engine._server is not None
    assert engine._server._process is not None
    assert len(os.listdir(f"/proc/{engine._server._process.pid}/task")) == 1


DESCRIBE_PROCESS = """
import json, os, sys
if __name__ == "__main__":
    print(json.dumps({
        "argv": sys.argv[1:],
        "leads_session": os.getsid(0) == os.getpid(),
        "stdin": os.readlink("/proc/self/fd/0"),
        "env": [os.environ[name] for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "QKFLOW_TEST_MARK")],
    }), flush=True)
    print("as stderr", file=sys.stderr)
    sys.exit(5)
"""


def test_worker_process_of_another_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "describe_process.py").write_text(DESCRIBE_PROCESS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv(MARK, "as in the study")
    engine = LocalEngine(threads=3, device="cpu", module="describe_process")
    monkeypatch.setattr(engine, "n_gpus", 2)
    try:
        assert exit_code(engine.start(tmp_path, slot=3)) == 5
    finally:
        engine.close()
    out, err = (tmp_path / "log.txt").read_text().splitlines()
    assert err == "as stderr"
    assert json.loads(out) == {
        "argv": [str(tmp_path)],
        "leads_session": True,
        "stdin": os.devnull,
        "env": ["1", "3", "as in the study"],
    }


def test_exit_codes_and_messages(engine: LocalEngine, run_folder: RunFolder) -> None:
    rejected = run_folder("rejected", model={"attention": {"coupling": "eulr"}})
    assert exit_code(engine.start(rejected, 0)) == EXIT_BAD_INPUT
    assert InputError.from_line(RunDir(rejected).last_log_line()).code == "unknown-coupling"
    broken = run_folder("broken")
    (broken / "metrics.jsonl").mkdir()
    assert exit_code(engine.start(broken, 0)) == EXIT_FAILED
    assert "Traceback" in (broken / "log.txt").read_text()


def test_sigterm_saves_and_the_run_resumes(engine: LocalEngine, run_folder: RunFolder) -> None:
    folder = run_folder(**LONG)
    handle = engine.start(folder, 0)
    wait_for(lambda: has_trained(folder))
    assert exit_code(engine.start(folder, 1)) == RUN_LOCKED
    handle.stop()
    assert exit_code(handle) == EXIT_INTERRUPTED
    assert list((folder / "checkpoints").iterdir())


def test_close_kills_workers_and_server(run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = str(uuid.uuid4())
    monkeypatch.setenv(MARK, mark)
    engine = LocalEngine(device="cpu")
    folder = run_folder(**LONG)
    engine.start(folder, 0)
    wait_for(lambda: has_trained(folder))
    assert len(marked_processes(mark)) == 2
    engine.close()
    wait_for(lambda: not marked_processes(mark))


def test_killed_server_is_replaced(run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = str(uuid.uuid4())
    monkeypatch.setenv(MARK, mark)
    engine = LocalEngine(device="cpu")
    folder = run_folder("first", **LONG)
    handle = engine.start(folder, 0)
    wait_for(lambda: has_trained(folder))
    assert engine._server is not None
    assert engine._server._process is not None
    engine._server._process.kill()
    assert exit_code(handle) == -signal.SIGKILL
    try:
        assert exit_code(engine.start(run_folder("second"), 0)) == EXIT_FINISHED
    finally:
        engine.close()
    wait_for(lambda: not marked_processes(mark))


LONG_TOKENS = 200_000  # minutes
# No `if __name__ == "__main__"`: a worker that imports the script would start the study again.
SCRIPT = """
import json, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes ignore SIGINT
with open(sys.argv[1] + ".starts", "a") as file:
    file.write("started\\n")
from qkflow.studies import compare
comparison = compare(
    sys.argv[2], out=sys.argv[1], variants="euler", controls="none", inits="gpt2", seeds=1, verdict=False,
    tokenizer="bytes", seq_len=8, batch_size=2, tokens=int(sys.argv[3]), jobs=2, device="cpu",
)
print(json.dumps([[run.status for run in comparison.runs], comparison.execution_time.train_share]))
"""


class ScriptStudy:
    """A study that runs in a script of its own, found by the mark of its processes."""

    def __init__(self, folder: Path, corpus: Path, tokens: int) -> None:
        self.folder, self.mark = folder, str(uuid.uuid4())
        script = folder.with_name("script.py")
        script.write_text(SCRIPT)
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(folder), str(corpus), str(tokens)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, MARK: self.mark},
        )

    def __enter__(self) -> ScriptStudy:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in marked_processes(self.mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def others(self) -> list[int]:
        return [pid for pid in marked_processes(self.mark) if pid != self.process.pid]

    def wait_for_training(self) -> None:
        def all_trained() -> bool:
            runs = list(self.folder.glob("runs/*"))
            return len(runs) == 2 and all(map(has_trained, runs))

        wait_for(lambda: self.process.poll() is not None or all_trained())
        assert self.process.poll() is None, self.process.communicate()[1]
        assert len(self.others()) == 3  # the server and two workers


def test_script_without_main_guard(tmp_path: Path, corpus: Path) -> None:
    with ScriptStudy(tmp_path / "study", corpus, 64) as study:
        stdout, stderr = study.process.communicate(timeout=60)
        assert study.process.returncode == 0, stderr
        wait_for(lambda: not study.others())
    statuses, train_share = json.loads(stdout)
    assert statuses == ["finished", "finished"]
    assert 0 < train_share < 1
    assert (tmp_path / "study.starts").read_text() == "started\n"


def test_interrupted_study_leaves_no_process(tmp_path: Path, corpus: Path) -> None:
    with ScriptStudy(tmp_path / "study", corpus, LONG_TOKENS) as study:
        study.wait_for_training()
        study.process.send_signal(signal.SIGINT)
        study.process.communicate(timeout=60)
        wait_for(lambda: not study.others())
    assert len(list(tmp_path.glob("study/runs/*/checkpoints/*"))) >= 2


def test_killed_study_leaves_only_its_workers_which_hold_their_locks(
    tmp_path: Path, corpus: Path, engine: LocalEngine
) -> None:
    with ScriptStudy(tmp_path / "study", corpus, LONG_TOKENS) as study:
        study.wait_for_training()
        study.process.kill()
        study.process.communicate()
        wait_for(lambda: len(study.others()) == 2)  # the server is gone
        runs = list(tmp_path.glob("study/runs/*"))
        steps = [RunDir(run).metrics()["train"][-1]["step"] for run in runs]
        for run, step in zip(runs, steps, strict=True):
            assert exit_code(engine.start(run, 0)) == RUN_LOCKED
            wait_for(lambda run=run, step=step: RunDir(run).metrics()["train"][-1]["step"] > step)
        for pid in study.others():
            os.kill(pid, signal.SIGTERM)
        wait_for(lambda: not study.others())
    assert len(list(tmp_path.glob("study/runs/*/checkpoints/*"))) >= 2


OWNER = """
import sys
from pathlib import Path
from qkflow.studies.runner.engines import LocalEngine
# a worker whose own child leaves its session, and is orphaned
worker = (sys.executable, "-S", "-c", '''
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
time.sleep(600)
''')
engine = LocalEngine(worker, device="cpu", owns_workers=True)
engine.start(Path(sys.argv[1]), 0).poll()
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs a subreaper")
def test_owned_workers_and_their_orphans_die_with_their_owner(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdin=subprocess.PIPE, env={**os.environ, MARK: mark}
    )
    try:  # the owner, the server, the worker and its orphan
        wait_for(lambda: len(marked_processes(mark)) == 4, timeout=200)
        owner.kill()
        owner.wait()
        wait_for(lambda: not marked_processes(mark))
    finally:
        for pid in marked_processes(mark):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="needs the signal at the death of a parent")
def test_owned_workers_die_with_a_killed_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray kills the children of an actor whose node is lost, and the server is one."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    sleeper = (sys.executable, "-S", "-c", "import time; time.sleep(600)")
    engine = LocalEngine(sleeper, device="cpu", owns_workers=True)
    try:
        worker = engine.start(tmp_path, 0)
        server, _ = sorted(wait_for(lambda: len(pids := marked_processes(mark)) == 2 and pids, timeout=200))
        os.kill(server, signal.SIGKILL)
        wait_for(lambda: not marked_processes(mark))
        assert worker.poll() == -signal.SIGKILL
    finally:
        for pid in marked_processes(mark):
            os.kill(pid, signal.SIGKILL)
        engine.close()
