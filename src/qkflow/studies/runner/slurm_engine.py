"""Runs as the tasks of a SLURM job array, on nodes that share the study's folder.

All runs of a phase are submitted by one `sbatch` script. Before its time limit ends, or when it is preempted,
a job gets SIGTERM: the worker saves its state and exits with 75, and the job requeues itself. The other exit
codes are written into the folder of the run.

The jobs outlive the study: after Ctrl-C or a lost connection the same command finds the jobs that are still
in the queue by `slurm.json` in the run's folder, and submits the rest.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from qkflow.errors import InputError
from qkflow.files import write_atomic, write_json
from qkflow.plain_data import read_json
from qkflow.studies.config import ExecutionConfig
from qkflow.studies.runner.engines import (
    WORKER_LOST,
    WORKER_MODULE,
    Retries,
    WorkerHandle,
    thread_variables,
    worker_command,
)
from qkflow.studies.runner.study_dir import LOG_FILE
from qkflow.training.run_dir import EXIT_INTERRUPTED

JOB_FILE = "slurm.json"  # in the folder of a run: its job
MAX_JOB_BYTES = 1 << 16
EXIT_CODE_FILE = ".slurm-exit-code"
SCRIPT_DIR = "slurm"  # in the folder of the study
MAX_ARRAY_SIZE = 1000  # SLURM's default limit is 1001
SECONDS_TO_SAVE = 120  # between SIGTERM and the time limit
QUEUE_INTERVAL = 15.0  # seconds between looks at the queue
ASSUMED_JOBS = 8  # runs at a time, if --jobs does not limit them

_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --array=0-{last}{limit}
#SBATCH --requeue
#SBATCH --signal=B:TERM@{seconds}
#SBATCH --open-mode=append
#SBATCH --output={output}
#SBATCH --ntasks=1
#SBATCH --cpus-per-task={cpus}
{options}
folders=(
{folders}
)
folder="${{folders[$SLURM_ARRAY_TASK_ID]}}"
cd {cwd} || exit 1
{exports}
rm -f "$folder/{exit_code_file}"
{command} "$folder" >> "$folder/{log}" 2>&1 &
worker=$!
trap 'kill -TERM $worker' TERM
wait $worker; code=$?
while kill -0 $worker 2> /dev/null; do wait $worker; code=$?; done  # SIGTERM ends a wait early
if [ $code -eq {interrupted} ]; then
  # its state is saved: the same task again
  scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}" && exit 0
fi
echo $code > "$folder/{exit_code_file}.part" && mv "$folder/{exit_code_file}.part" "$folder/{exit_code_file}"
exit $code
"""


class SlurmEngine:
    """A job array; `start` collects runs, and the first poll submits them."""

    retries = Retries(lost=3, failed=1)  # SLURM itself requeues the jobs of a lost node
    has_queue = True

    def __init__(
        self,
        execution: ExecutionConfig,
        *,
        command: Sequence[str] | None = None,
        module: str = WORKER_MODULE,
    ) -> None:
        if shutil.which("sbatch") is None:
            raise InputError(
                "--engine slurm needs sbatch, which is not on the PATH: run on a login node of the cluster",
                code="missing-slurm",
            )
        self.execution = execution
        self.command = worker_command(command, module, execution.processes_per_run)
        self._collected: list[_SlurmRun] = []
        self._queued: set[str] = set()  # ids of tasks, as squeue prints them
        self._queue_time = float("-inf")

    def default_jobs(self) -> int:
        return self.execution.jobs or ASSUMED_JOBS

    def check_folder(self, folder: Path) -> None:
        pass  # the first job finds out, and its log says so

    def start(self, folder: Path, slot: int) -> WorkerHandle:
        run = _SlurmRun(self, folder.absolute())
        if run.job is None or not self.is_queued(run.job):
            run.job = None
            (run.folder / EXIT_CODE_FILE).unlink(missing_ok=True)
            self._collected.append(run)
        return run

    def submit(self) -> None:
        """Submit the collected runs as one array, or as several if they are very many."""
        while self._collected:
            runs, self._collected = self._collected[:MAX_ARRAY_SIZE], self._collected[MAX_ARRAY_SIZE:]
            job_id = _sbatch(self._write_script(runs))
            for index, run in enumerate(runs):
                run.job = f"{job_id}_{index}"
                write_json(run.folder / JOB_FILE, {"job": run.job})
            self._queue_time = float("-inf")

    def _write_script(self, runs: Sequence[_SlurmRun]) -> Path:
        execution, study = self.execution, runs[0].folder.parents[1]
        scripts = study / SCRIPT_DIR
        variables = {key: value for key, value in os.environ.items() if key.startswith("QKFLOW_")}
        variables |= thread_variables(execution.threads)
        script = scripts / f"{int(1000 * time.time())}.sbatch"
        write_atomic(
            script,
            _SCRIPT.format(
                name=f'"qkflow-{study.name}"',
                last=len(runs) - 1,
                limit=f"%{execution.jobs}" if execution.jobs else "",
                seconds=SECONDS_TO_SAVE,
                output=f'"{scripts}/%A_%a.out"',
                cpus=execution.cpus_per_run or execution.threads * execution.processes_per_run,
                options="\n".join(f"#SBATCH {option}" for option in self._options()),
                folders="\n".join(shlex.quote(str(run.folder)) for run in runs),
                cwd=shlex.quote(os.getcwd()),
                exports="\n".join(f"export {key}={shlex.quote(value)}" for key, value in variables.items()),
                exit_code_file=EXIT_CODE_FILE,
                command=shlex.join(self.command),
                log=LOG_FILE,
                interrupted=EXIT_INTERRUPTED,
            ),
        )
        return script

    def _options(self) -> list[str]:
        gpus = self.execution.gpus_per_run
        if gpus is not None and gpus != int(gpus):
            raise InputError(
                f"--gpus-per-run {gpus:g} is not a whole number, which SLURM needs",
                code="invalid-gpus-per-run",
            )
        options = [f"--gpus-per-node={int(gpus)}"] if gpus else []
        return [*options, *shlex.split(self.execution.slurm_options or "")]

    def is_queued(self, job: str) -> bool:
        """Return whether a task is waiting or running. Reads the queue at most every QUEUE_INTERVAL."""
        if time.monotonic() - self._queue_time > QUEUE_INTERVAL:
            command = ["squeue", "--me", "--noheader", "--array", "--format=%i"]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
            except (OSError, subprocess.SubprocessError):
                return True  # the scheduler is busy: ask again later
            self._queued, self._queue_time = set(done.stdout.split()), time.monotonic()
        return job in self._queued

    def close(self) -> None:
        pass


class _SlurmRun:
    """The handle of one task of an array."""

    sentinel = None

    def __init__(self, engine: SlurmEngine, folder: Path) -> None:
        self._engine, self.folder = engine, folder
        self.job = _read_job(folder)
        self._missing_since: float | None = None  # in the queue

    def poll(self) -> int | None:
        self._engine.submit()
        try:
            return int((self.folder / EXIT_CODE_FILE).read_text())
        except (FileNotFoundError, ValueError):
            pass
        if self.job is None or self._engine.is_queued(self.job):
            self._missing_since = None
            return None
        self._missing_since = self._missing_since or time.monotonic()
        if time.monotonic() - self._missing_since < QUEUE_INTERVAL:
            return None  # a shared file system may show the exit code a little later
        return WORKER_LOST  # cancelled, or lost with its node

    def stop(self) -> None:
        pass  # jobs outlive the study

    def kill(self) -> None:
        if self.job is not None:
            subprocess.run(["scancel", self.job], capture_output=True, check=False)


def _read_job(folder: Path) -> str | None:
    """Return the job of a run; None if no job has such an id, which becomes an argument of programs."""
    try:
        job = read_json(folder / JOB_FILE, MAX_JOB_BYTES)["job"]
    except (OSError, InputError, KeyError, TypeError):
        return None
    return str(job) if re.fullmatch(r"[0-9]{1,18}(_[0-9]{1,18})?", str(job)) else None


def _sbatch(script: Path) -> str:
    """Submit a script. Return the id of its job."""
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise InputError(f"sbatch refuses {script} ({reason}): see --slurm-options", code="sbatch-failed")
    return done.stdout.strip().partition(";")[0]
