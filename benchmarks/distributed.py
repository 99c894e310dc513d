"""Speed, memory and overhead of training in several processes, on CPUs over gloo.

    python benchmarks/distributed.py speed       # DDP on 2 processes × 1 thread beside 1 × 1: tokens/s
    python benchmarks/distributed.py overhead    # ddp and fsdp on one process of torchrun beside no torchrun
    python benchmarks/distributed.py memory      # FSDP2 on 2 processes: weights and optimizer state per rank

Each starts torchrun itself. Rounds alternate between the variants inside one process group; while rank 0
trains alone, the other ranks wait. All train the same global batches. Printed: the median ratio over rounds
with a bootstrap interval. Memory is counted from the tensors of the local shards after one step.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from qkflow.bench.timing import TimeRatio, summarize_ratios
from qkflow.data import TokenSet, prepare
from qkflow.training import Callback, RunConfig, Trainer
from qkflow.training.config import ParallelMode
from qkflow.training.distributed import DistContext

PROCESSES = {"speed": 2, "overhead": 1, "memory": 2}
CPU = torch.device("cpu")
ONE_PROCESS = DistContext(CPU)


def run_config(options: argparse.Namespace, steps: int) -> RunConfig:
    data = {"corpus": options.corpus, "tokenizer": "bpe:8192", "seq_len": options.seq_len}
    train = {"steps": steps, "batch_size": options.batch_size, "optimizer": options.optimizer, "lr": 1e-3}
    train |= {"log_every": 10, "evaluations": 1, "eval_tokens": 256, "probe_every": 0, "device": "cpu"}
    return RunConfig.from_dict({"model": {"preset": options.preset}, "data": data, "train": train})


class StepTimes(Callback):
    """Records wall-clock time and CPU time of this process at the end of each step."""

    def __init__(self) -> None:
        self.wall, self.cpu = list[float](), list[float]()

    def on_step(self, trainer: Trainer, loss: torch.Tensor) -> None:
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())


def step_seconds(config: RunConfig, data: TokenSet, context: DistContext, clock: str) -> float:
    """Train and return the median time of a step, of the slowest process."""
    times = StepTimes()
    gc.collect()  # the model before this one
    with tempfile.TemporaryDirectory() as folder:
        Trainer(Path(folder), config, data, context, times, threading.Event()).train()
    ends = times.wall if clock == "wall" else times.cpu
    seconds = statistics.median(after - before for before, after in itertools.pairwise(ends))
    slowest = torch.tensor(seconds, dtype=torch.float64)
    if context.world_size > 1:
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def interleave(
    options: argparse.Namespace, data: TokenSet, modes: tuple[ParallelMode, ...]
) -> dict[str, list[tuple[float, float]]]:
    """Return pairs of step times by mode: in one process without torchrun, and in this process group."""
    config = run_config(options, options.steps)
    contexts = {mode: DistContext(CPU, mode, dist.get_rank(), dist.get_world_size()) for mode in modes}
    pairs: dict[str, list[tuple[float, float]]] = {mode: [] for mode in modes}
    for round_number in range(options.rounds + 1):
        for mode, context in contexts.items():
            times = {}
            for variant in (mode, "one")[:: 1 if round_number % 2 else -1]:
                dist.barrier()
                if variant == mode:
                    times["group"] = step_seconds(config, data, context, options.clock)
                elif dist.get_rank() == 0:
                    times["one"] = step_seconds(config, data, ONE_PROCESS, options.clock)
            if round_number and dist.get_rank() == 0:  # round 0 is the warmup
                pairs[mode].append((times["one"], times["group"]))
    return pairs


def measure_speed(options: argparse.Namespace, data: TokenSet) -> dict[str, Any]:
    tokens = options.batch_size * options.seq_len
    pairs = interleave(options, data, ("ddp",))["ddp"]
    if dist.get_rank():
        return {}
    speedup = summarize_ratios(pairs)
    return {
        "speedup": _interval(speedup),
        "tokens_per_second": {
            "1 process": tokens / statistics.median(one for one, _ in pairs),
            f"{dist.get_world_size()} processes": tokens / statistics.median(group for _, group in pairs),
        },
    }


def measure_overhead(options: argparse.Namespace, data: TokenSet) -> dict[str, Any]:
    pairs = interleave(options, data, ("ddp", "fsdp"))
    return {
        mode: _interval(summarize_ratios([(group, one) for one, group in times]))
        for mode, times in pairs.items()
    }


def _interval(ratio: TimeRatio) -> dict[str, float]:
    return {"ratio": ratio.ratio, "low": ratio.low, "high": ratio.high}


def measure_memory(options: argparse.Namespace, data: TokenSet) -> dict[str, Any]:
    """Return the bytes of weights and optimizer state of one process and of every rank."""
    config = run_config(options, steps=1)
    sizes = []
    for context in (ONE_PROCESS, DistContext(CPU, "fsdp", dist.get_rank(), dist.get_world_size())):
        trainer = Trainer(Path(os.devnull), config, data, context, Callback(), threading.Event())
        if context.is_sharded:
            trainer.stepper.step(0, 1e-3, 0.0)
        state = trainer.stepper.state_dict().values()
        local = [getattr(tensor, "_local_tensor", tensor) for tensor in state]
        sizes.append(sum(tensor.untyped_storage().nbytes() for tensor in local))
    shards: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(shards, sizes[1])
    return {"one process": sizes[0], "ranks": shards, "ratio": max(shards) / sizes[0]}


MEASURES = {"speed": measure_speed, "overhead": measure_overhead, "memory": measure_memory}


def show(report: dict[str, Any], options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps({**vars(options), **report}))
        return
    print(
        f"{options.preset}, batch_size {options.batch_size}, seq_len {options.seq_len}, {options.optimizer}"
    )
    if options.measure == "memory":
        ranks = ", ".join(f"{size / 1e6:.1f} MB" for size in report["ranks"])
        print(f"  weights and optimizer state: {report['one process'] / 1e6:.1f} MB in one process")
        ratio = f"largest / one process {report['ratio']:.3f}"
        print(f"  fsdp on {len(report['ranks'])} processes: {ranks}; {ratio}")
        return
    for name, tokens in report.pop("tokens_per_second", {}).items():
        print(f"  {name}: {tokens:,.0f} tokens/s ({options.clock} clock)")
    for name, cell in report.items():
        print(
            f"  {name}: {cell['ratio']:.3f}x (95% interval {cell['low']:.3f} to {cell['high']:.3f}, "
            f"{options.rounds} rounds)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measure", choices=list(MEASURES))
    parser.add_argument("--preset", default="small")
    parser.add_argument("--corpus", default="speeches")
    parser.add_argument("--batch-size", type=int, default=16, help="of all processes together")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--steps", type=int, default=6, help="per variant and round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--clock", choices=["wall", "process"], default="wall", help="process: CPU time, for a busy machine"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        processes = ["--nproc-per-node", str(PROCESSES[options.measure])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        sys.exit(subprocess.run([*torchrun, *processes, __file__, *sys.argv[1:]], env=environment).returncode)
    torch.set_flush_denormal(True)
    dist.init_process_group("gloo")
    config = run_config(options, steps=1)
    data = prepare(config.data.corpus, config.data.tokenizer, show_progress=dist.get_rank() == 0)
    report = MEASURES[options.measure](options, data)
    if dist.get_rank() == 0:
        show(report, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
