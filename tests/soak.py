"""Minutes of abuse, with counts: `make soak`, or `python tests/soak.py [memory report kills interrupts]`.

    memory       one long run; growth of the resident memory after warm-up
    report       CPU time to judge and draw a study of 200 runs
    kills        SIGKILL of training runs at random moments; every end must be bit-identical
    interrupts   SIGINT of `qkflow compare` at random moments; no process and no temporary file may stay, and
                 every end must be bit-identical

Random moments are seeded; what they hit depends on the load of the machine. Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent / "helpers"))
sys.path.insert(0, str(Path(__file__).parent / "training"))

import torch
import yaml
from kill_worker import start_worker, wait

from made_study import write_study
from qkflow.cli.main import main as run_command
from qkflow.report import write_outputs
from qkflow.studies import ComparisonConfig, load_comparison
from qkflow.training import loop
from qkflow.training.callbacks import Callback
from qkflow.training.config import RunConfig
from qkflow.training.metrics_log import read_rows
from words import WORDS

MAX_GROWTH = 0.02
MAX_REPORT_SECONDS = 10.0
MARK = "QKFLOW_SOAK"  # in the environment of a study and of all its descendants
COUPLINGS = ("none", "euler", "leapfrog:n=2", "affine", "drift")


def write_corpus(folder: Path) -> Path:
    generator = random.Random(0)
    path = folder / "corpus.txt"
    path.write_text("\n\n".join(" ".join(generator.choices(WORDS, k=60)) for _ in range(200)))
    return path


def run_config(corpus: Path, coupling: str = "none", **train: Any) -> dict[str, Any]:
    return {
        "model": {"n_layers": 1, "dim": 16, "n_heads": 2, "attention": {"coupling": coupling}},
        "data": {"corpus": str(corpus), "tokenizer": "bytes", "seq_len": 16},
        "train": {"batch_size": 4, "evaluations": 2, "eval_tokens": 256, **train},
    }


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class MemoryCallback(Callback):
    def __init__(self) -> None:
        self.samples: list[int] = []  # every 100 steps

    def on_step(self, trainer: loop.Trainer, loss: Any) -> None:
        if trainer.step % 100 == 0:
            self.samples.append(resident_bytes())


def soak_memory(folder: Path, corpus: Path, steps: int) -> bool:
    callback = MemoryCallback()
    every = max(1, steps // 20)
    config = run_config(corpus, "euler", steps=steps, save_every=every, log_every=10, eval_every=every)
    loop.train(folder / "long", RunConfig.from_dict(config), callback)
    warm_up = callback.samples[len(callback.samples) // 5]
    growth = max(callback.samples[len(callback.samples) // 5 :]) / warm_up - 1
    print(f"memory: {steps:,} steps, {warm_up / 1e6:.1f} MB after warm-up, largest growth {growth:+.2%}")
    return growth <= MAX_GROWTH


def soak_report(folder: Path) -> bool:
    variants = ("standard", "euler", "drift", "affine", "leapfrog:n=2", "leapfrog:n=4", "uncoupled")
    variants += ("nonlinear_query", "euler+differential", "affine+differential")
    config = ComparisonConfig(
        variants=variants, inits=("gpt2", "fan_in"), seeds=10, tokens=100_000, controls=()
    )
    cells = [f"{variant}@{init}" for variant in variants for init in config.inits]
    study = write_study(folder / "study", config, {cell: 4.6 + 0.01 * i for i, cell in enumerate(cells)})
    start, cpu_start = time.perf_counter(), time.process_time()
    comparison = load_comparison(study)
    write_outputs(comparison)
    cpu, wall = time.process_time() - cpu_start, time.perf_counter() - start
    print(f"report: {len(comparison.runs)} runs in {cpu:.1f} s of CPU time ({wall:.1f} s)")
    return len(comparison.runs) >= 200 and cpu < MAX_REPORT_SECONDS


def content(run: Path) -> tuple[bytes, list[tuple[str, int, float]]]:
    """Return what must be bit-identical: losses and weights (runs of the noise floor keep none)."""
    rows = read_rows(run / "metrics.jsonl")
    losses = [(row["kind"], row["step"], row["loss"]) for row in rows if "loss" in row]
    weights = run / "model" / "model.safetensors"
    return weights.read_bytes() if weights.exists() else b"", losses


def soak_kills(folder: Path, corpus: Path, runs: int, kills_per_run: int) -> bool:
    generator, wrong, kills, while_writing = random.Random(1), 0, 0, 0
    references: dict[str, tuple[Any, float]] = {}
    number = -1
    while (number := number + 1) < runs or kills < runs * kills_per_run:
        coupling = COUPLINGS[number % len(COUPLINGS)]
        config = run_config(corpus, coupling, steps=150, save_every=1, log_every=1)
        paths = [folder / f"{name}-{number}" for name in ("killed", "reference")]
        for path in paths:
            path.mkdir()
            (path / "config.yaml").write_text(yaml.safe_dump(config))
        if coupling not in references:
            start = time.monotonic()
            assert wait(start_worker(paths[1])) == 0
            references[coupling] = content(paths[1]), time.monotonic() - start
        reference, seconds = references[coupling]
        killed = 0
        while killed < kills_per_run:
            pid = start_worker(paths[0])
            time.sleep(generator.uniform(0.01, seconds / kills_per_run))
            os.kill(pid, signal.SIGKILL)
            if wait(pid) != -signal.SIGKILL:  # it was faster
                break
            killed += 1
            while_writing += any(paths[0].glob("checkpoints/.*.part"))
        kills += killed
        finished = wait(start_worker(paths[0])) == 0
        left = list(paths[0].rglob("*.part")) or (paths[0] / "checkpoints").exists()
        wrong += not finished or bool(left) or content(paths[0]) != reference
    print(
        f"kills: {kills} in {number} runs, {while_writing} while a checkpoint was being written, "
        f"{number - wrong} of {number} ends bit-identical"
    )
    return wrong == 0


def start_study(folder: Path, corpus: Path, mark: str) -> int:
    """Fork a `qkflow compare` of 8 runs; its output goes to log.txt beside the folder."""
    options = (
        f"--data {corpus} --tokenizer bytes --variants euler --baselines standard --controls none "
        f"--inits gpt2 --seeds 4 --tokens 6k --seq-len 16 --batch-size 4 --jobs 2 --out {folder}"
    )
    pid = os.fork()
    if pid == 0:
        os.environ[MARK] = mark
        log = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["qkflow", "compare", *options.split()]
        try:
            run_command()
        except SystemExit as error:
            os._exit(error.code if isinstance(error.code, int) else 1)
        os._exit(1)
    return pid


def processes_with(mark: str) -> list[int]:
    """Return the processes whose environment has the mark. A forked one shares that of its server."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:  # it has just ended, or is not ours
            continue
    return found


def study_content(folder: Path) -> dict[str, Any]:
    return {run.name: content(run) for run in sorted((folder / "runs").iterdir())}


def soak_interrupts(folder: Path, corpus: Path, interrupts: int) -> bool:
    start = time.monotonic()
    assert wait(start_study(folder / "reference", corpus, "reference")) == 0
    seconds, reference = time.monotonic() - start, study_content(folder / "reference")
    generator, done, studies, orphans, leftovers, wrong = random.Random(2), 0, 0, 0, 0, 0
    while done < interrupts:
        study = folder / f"study-{studies}"
        studies += 1
        code = -1
        while code != 0:
            mark = f"{studies}-{done}"
            pid = start_study(study, corpus, mark)
            if done < interrupts:
                time.sleep(generator.uniform(0.02, seconds))
                os.kill(pid, signal.SIGINT)
            code = wait(pid)
            if code not in (0, 130):
                print(f"exit code {code}: {study.with_suffix('.log').read_text()[-2000:]}")
                return False
            done += code == 130
            orphans += len(processes_with(mark))
            leftovers += sum(1 for _ in study.rglob("*.part"))
        wrong += study_content(study) != reference
    print(
        f"interrupts: {done} of {studies} comparisons, {orphans} processes and {leftovers} temporary files "
        f"left, {studies - wrong} of {studies} ends bit-identical"
    )
    return orphans == leftovers == wrong == 0


def in_child(part: Callable[[], bool]) -> bool:
    """Run a part in a forked process: one that has trained must not fork again."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = int(not part())
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    return wait(pid) == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["memory", "report", "kills", "interrupts"])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=50, help="that are killed")
    parser.add_argument("--interrupts", type=int, default=50)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["QKFLOW_CACHE"] = str(folder / "cache")
        corpus = write_corpus(folder)
        parts: dict[str, Callable[[], bool]] = {
            "memory": lambda: soak_memory(folder, corpus, options.steps),
            "report": lambda: soak_report(folder),
            "kills": lambda: soak_kills(folder, corpus, options.runs, kills_per_run=2),
            "interrupts": lambda: soak_interrupts(folder, corpus, options.interrupts),
        }
        missed = [part for part in options.parts if not in_child(parts[part])]
    print(f"missed: {', '.join(missed)}" if missed else "all bars reached")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
