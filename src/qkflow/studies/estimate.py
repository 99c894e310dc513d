"""How long runs take on this machine: FLOPs, and a second of training steps on random tokens."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from qkflow.data.tokenizer import ByteTokenizer, bpe_vocab_size
from qkflow.errors import InputError
from qkflow.models.cost import flops_per_token
from qkflow.models.presets import PRESETS, preset
from qkflow.studies.config import ComparisonConfig
from qkflow.system import process_cpu_count, resolve_device

if TYPE_CHECKING:
    from qkflow.studies.workload import TrainedModel

MAX_RUNS = 2_000  # of one study
# Matmul FLOPs of training per second, as a fraction of those of a 512³ fp32 matmul on one CPU core: 0.6 for
# `tiny` and 0.78 for `small`. The rest is memory traffic, the optimizer and Python.
UTILIZATION = 0.7  # where no step is timed
RUN_OVERHEAD_SECONDS = 0.5  # start and end of a forked worker
STUDY_OVERHEAD_SECONDS = 5.0  # importing torch in the server of workers, preparing data, writing the report
_TIMED_SECONDS = 1.0
_LONGEST_STEP = 2.0  # seconds; a longer step is not timed
_MATMUL_SIZE = {"cpu": 512}  # short enough to run uninterrupted on a busy machine; other devices: 4096


def matmul_flops_per_second(device: str, threads: int = 1, seconds: float = 0.2) -> float:
    """Measure an fp32 matmul; the fastest of several, since other processes may use the machine."""
    target = resolve_device(device)
    size = _MATMUL_SIZE.get(target.type, 4096)
    a, b = torch.ones(2, size, size, device=target)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        fastest, end = float("inf"), time.perf_counter() + seconds
        while time.perf_counter() < end or fastest == float("inf"):
            start = time.perf_counter()
            (a @ b)[0, 0].item()  # waits for the device
            fastest = min(fastest, time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return 2 * size**3 / fastest


def training_utilization(
    model: TrainedModel, flops_per_token: float, matmul_speed: float, threads: int, jobs: int
) -> float:
    """Return the FLOPs per second of training steps, relative to those of a matmul.

    Steps of `jobs` models at a time are timed on random tokens: runs share caches and memory bandwidth. Steps
    of seconds, and those of other devices than a CPU, are not timed.
    """
    train = model.train
    flops = train.batch_size * model.seq_len * flops_per_token
    is_cpu = resolve_device(train.device).type == "cpu"
    if not is_cpu or flops > _LONGEST_STEP * UTILIZATION * matmul_speed:
        return UTILIZATION
    with _preserved_random_state(), ThreadPoolExecutor(jobs) as pool:
        seconds = list(pool.map(lambda _: _step_seconds(model, threads), range(jobs)))
    return flops / statistics.fmean(seconds) / matmul_speed


def _step_seconds(model: TrainedModel, threads: int) -> float:
    """Return the time of a training step, the fastest of several, as for a matmul."""
    from qkflow.models import Decoder
    from qkflow.training.distributed import DistContext
    from qkflow.training.step import Stepper

    class RandomWindows:
        def batch(self, step: int) -> np.ndarray:
            shape = (model.train.batch_size, model.seq_len + 1)
            return np.random.default_rng(step).integers(model.config.vocab_size, size=shape)

    torch.set_num_threads(threads)
    context = DistContext(torch.device("cpu"))
    windows: Any = RandomWindows()
    stepper = Stepper(Decoder(model.config, seed=0), model.train, windows, context, total_steps=1)
    ends = [time.perf_counter()]
    while len(ends) < 4 or ends[-1] - ends[1] < _TIMED_SECONDS:
        stepper.step(len(ends), model.train.lr, progress=0.0)
        ends.append(time.perf_counter())
    return min(end - start for start, end in itertools.pairwise(ends[1:]))


@contextmanager
def _preserved_random_state() -> Iterator[None]:
    """Leave all generators and the number of threads as they are: a step seeds them."""
    python, numpy, threads = random.getstate(), np.random.get_state(), torch.get_num_threads()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_num_threads(threads)


def default_jobs(device: str, threads: int) -> int:
    """Return the runs at a time of the local engine: one per GPU, or per `threads` CPU cores."""
    if resolve_device(device).type == "cuda":
        return torch.cuda.device_count()
    return max(1, process_cpu_count() // threads)


def vocab_size(tokenizer: str, preset_name: str) -> int:
    """Return the size of a vocabulary without reading it; for a path or hf:NAME that of the preset."""
    if tokenizer == "bytes":
        return ByteTokenizer.vocab_size
    return bpe_vocab_size(tokenizer) or PRESETS[preset_name].vocab_size


def hours(
    flops: float, n_runs: int, matmul_speed: float, jobs: int, utilization: float = UTILIZATION
) -> float:
    """Return the hours that `n_runs` runs with `flops` in total take, `jobs` at a time."""
    return (flops / (utilization * matmul_speed) + RUN_OVERHEAD_SECONDS * n_runs) / jobs / 3600


def check_run_count(n_runs: int, config: ComparisonConfig) -> None:
    """Raise InputError if a study has more runs than anyone means to start."""
    if n_runs <= MAX_RUNS:
        return
    if config.tokens is None:
        duration = f"in {config.minutes:g} minutes"
    else:
        model = preset(config.preset, vocab_size=vocab_size(config.tokenizer, config.preset))
        flops = n_runs * config.tokens * flops_per_token(model, config.seq_len)
        jobs = default_jobs(config.device, 1)
        estimate = hours(flops, n_runs, matmul_flops_per_second(config.device), jobs)
        duration = f"about {estimate:,.0f} hours on this machine"
    raise InputError(
        f"these are {n_runs:,} runs, {duration}, and a study has at most {MAX_RUNS:,}: use fewer variants, "
        "values in sweeps, inits or seeds",
        code="too-many-runs",
    )
