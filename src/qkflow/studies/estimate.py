"""How long runs take on this machine, from matmul FLOPs alone: before anything is prepared or trained."""

from __future__ import annotations

import time

import torch

from qkflow.data.tokenizer import ByteTokenizer, bpe_vocab_size
from qkflow.errors import InputError
from qkflow.models.cost import flops_per_token
from qkflow.models.presets import PRESETS, preset
from qkflow.studies.config import ComparisonConfig
from qkflow.system import process_cpu_count, resolve_device

MAX_RUNS = 2_000  # of one study
# Matmul FLOPs of training per second, as a fraction of those of a 512³ fp32 matmul on one CPU core: 0.65 for
# `tiny` and 0.78 for `small`. The rest is memory traffic, the optimizer and Python.
UTILIZATION = 0.7
RUN_OVERHEAD_SECONDS = 0.5  # start and end of a forked worker
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


def hours(flops: float, n_runs: int, flops_per_second: float, jobs: int) -> float:
    """Return the hours that `n_runs` runs with `flops` in total take, `jobs` at a time."""
    return (flops / (UTILIZATION * flops_per_second) + RUN_OVERHEAD_SECONDS * n_runs) / jobs / 3600


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
