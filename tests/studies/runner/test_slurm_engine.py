"""The SLURM engine with a fake scheduler on the PATH, which runs the array of a script on this machine."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from input_errors import raises_code
from qkflow.studies import compare
from qkflow.studies.config import ExecutionConfig
from qkflow.studies.runner import build_engine, slurm_engine
from toy_study import TOY

SETTINGS: dict[str, Any] = {**TOY, "variants": "euler", "inits": "gpt2", "seeds": 1, "verdict": False}

# One file plays sbatch, scontrol, squeue and scancel. The first start of one task gets SIGTERM.
FAKE = f"""#!{sys.executable}
import json, os, pathlib, re, signal, subprocess, sys, time
state = pathlib.Path(os.environ["FAKE_SLURM"])
name, arguments = pathlib.Path(sys.argv[0]).name, sys.argv[1:]
with open(state / "calls", "a") as file:
    file.write(json.dumps([name, *arguments]) + "\\n")
if name == "scontrol":
    (state / ("requeue-" + arguments[1])).touch()
elif name == "squeue":
    print("\\n".join(path.name[7:] for path in state.glob("queued-*")))
elif name == "sbatch":
    if "FAKE_REFUSES" in os.environ:
        sys.exit("sbatch: error: invalid partition specified: gpu")
    script = pathlib.Path(arguments[-1])
    last = int(re.search("--array=0-([0-9]+)", script.read_text())[1])
    job = str(len(list(state.glob("job-*"))) + 1)
    tasks = [job + "_" + str(index) for index in range(last + 1)]
    for each in [f"job-{{job}}", *["queued-" + task for task in tasks]]:
        (state / each).touch()
    if os.fork() == 0:  # the queue
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        os.dup2(1, 2)
        for index, task in enumerate(tasks):
            env = dict(os.environ, SLURM_ARRAY_JOB_ID=job, SLURM_ARRAY_TASK_ID=str(index))
            while True:
                process = subprocess.Popen(["bash", str(script)], env=env)
                folders = re.search(r"folders=\\(\\n([^)]*)\\n", script.read_text())[1]
                folder = folders.split("\\n")[index].strip("'")
                signaled = os.environ.get("FAKE_SIGNAL", "?")
                if signaled in folder and not (state / "signaled").exists():
                    (state / "signaled").touch()
                    while not pathlib.Path(folder, "starts.txt").exists():
                        time.sleep(0.02)
                    time.sleep(0.3)
                    process.send_signal(signal.SIGTERM)
                process.wait()
                requeued = state / ("requeue-" + task)
                if not requeued.exists():
                    break
                requeued.unlink()
            (state / ("queued-" + task)).unlink()
    else:
        print(job)
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the fake scheduler on the PATH; return the folder of its state."""
    bin_dir, state = tmp_path / "bin", tmp_path / "state"
    bin_dir.mkdir()
    state.mkdir()
    for name in ("sbatch", "scontrol", "squeue", "scancel"):
        (bin_dir / name).write_text(FAKE)
        (bin_dir / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_dir}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(state))
    monkeypatch.setattr(slurm_engine, "QUEUE_INTERVAL", 0.5)
    return state


def calls(state: Path, name: str) -> list[list[str]]:
    rows = [json.loads(line) for line in (state / "calls").read_text().splitlines()]
    return [row for row in rows if row[0] == name]


def losses(comparison: Any) -> list[Any]:
    return [(run.cell, run.seed, run.result["loss"]) for run in comparison.compared_runs]


def test_study_equals_the_local_engine(slurm: Path, tmp_path: Path) -> None:
    settings = {**SETTINGS, "variants": "euler", "seeds": 2}
    local = compare("toy", out=tmp_path / "local", **settings)
    options = {
        "jobs": 3,
        "cpus_per_run": 2,
        "gpus_per_run": 1,
        "slurm_options": "--partition=gpu --time=1:00",
    }
    study = compare("toy", out=tmp_path / "my study", engine="slurm", **options, **settings)
    assert losses(study) == losses(local)
    arrays = calls(slurm, "sbatch")
    assert len(arrays) == 1
    script = Path(arrays[0][-1]).read_text()
    for option in ('--job-name="qkflow-my study"', "--array=0-3%3", "--requeue", "--signal=B:TERM@",
                   "--cpus-per-task=2", "--gpus-per-node=1", "--partition=gpu", "--time=1:00"):  # fmt: skip
        assert f"#SBATCH {option}" in script


def test_interrupted_task_requeues_itself(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**SETTINGS, "variants": "sleepy"}
    local = compare("toy", out=tmp_path / "local", **settings)
    monkeypatch.setenv("FAKE_SIGNAL", "sleepy")
    study = compare("toy", out=tmp_path / "s", engine="slurm", **settings)
    assert losses(study) == losses(local)
    ((_, command, task),) = calls(slurm, "scontrol")
    assert (command, task) == ("requeue", "1_1")
    (starts,) = (tmp_path / "s").glob("runs/sleepy*/starts.txt")
    first, second = [int(line.split()[-1]) for line in starts.read_text().splitlines()]
    assert first == 0 < second


def test_jobs_in_the_queue_are_found_again(slurm: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "slurm.json").write_text('{"job": "9_0"}')
    (slurm / "queued-9_0").touch()
    engine = build_engine(ExecutionConfig("slurm"))
    run = engine.start(folder, 0)
    assert run.poll() is None
    assert not calls(slurm, "sbatch")
    (folder / slurm_engine.EXIT_CODE_FILE).write_text("0\n")
    assert run.poll() == 0


@pytest.mark.parametrize("job", ["--me", "9_0 8", "", 1.5, None, ["9"]])
def test_only_the_id_of_a_job_is_read(job: object, tmp_path: Path) -> None:
    (tmp_path / "slurm.json").write_text(json.dumps({"job": job}))
    assert slurm_engine._read_job(tmp_path) is None


def test_cancelled_job_is_lost(slurm: Path, tmp_path: Path) -> None:
    import time

    from qkflow.studies.runner.engines import WORKER_LOST

    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    engine = build_engine(ExecutionConfig("slurm"), command=("bash", "-c", "kill -9 $PPID"))
    run = engine.start(folder, 0)  # the script of its task dies before it can write an exit code
    deadline = time.monotonic() + 30
    while (code := run.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert code == WORKER_LOST


def test_refused_script(slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_REFUSES", "1")
    with raises_code("sbatch-failed") as error:
        compare("toy", out=tmp_path / "s", engine="slurm", **SETTINGS)
    assert "invalid partition" in str(error.value)


def test_missing_slurm_is_reported_before_the_corpus_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    settings = {**SETTINGS, "prepare_data": lambda config: pytest.fail("prepared")}
    with raises_code("missing-slurm"):
        compare("toy", out=tmp_path / "s", engine="slurm", **settings)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"address": "127.0.0.1:1"}, "option-of-other-engine"),
        ({"gpus_per_run": 1}, "option-of-other-engine"),
        ({"engine": "ray", "slurm_options": "--time=1"}, "option-of-other-engine"),
        ({"engine": "ray", "cpus_per_run": 0}, "below-minimum"),
        ({"engine": "slurm", "gpus_per_run": -1}, "below-minimum"),
        ({"processes_per_run": 0}, "below-minimum"),
    ],
)
def test_options_of_engines(options: dict[str, Any], code: str) -> None:
    with raises_code(code):
        ExecutionConfig(**options).check()
