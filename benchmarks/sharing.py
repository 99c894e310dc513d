"""CPU cores for several runs: one thread each in parallel, or all threads for one run after another.

    python benchmarks/sharing.py                           # tiny, one run per core
    python benchmarks/sharing.py --preset small --steps 5

Both modes run the same steps in processes that are already warm, alternating. Printed: seconds for all runs,
speedup of the parallel mode (median and range over rounds).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path

import torch
from training import SHAPES, run_config

from qkflow.system import process_cpu_count
from qkflow.training import train


def run(name: str, batch_size: int, steps: int, corpus: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder), run_config(name, batch_size, steps, corpus))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="tiny", choices=list(SHAPES))
    parser.add_argument("--corpus", default="speeches")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30, help="per run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=int, default=process_cpu_count())
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    runs = [(options.preset, options.batch_size, options.steps, options.corpus)] * options.cores
    spawn = multiprocessing.get_context("spawn")  # a forked process would inherit threads
    times: dict[str, list[float]] = {"parallel": [], "sequential": []}
    with (
        spawn.Pool(options.cores, torch.set_num_threads, (1,)) as narrow,
        spawn.Pool(1, torch.set_num_threads, (options.cores,)) as wide,
    ):
        for round_number in range(options.rounds + 1):
            modes = list(zip(times, (narrow, wide), strict=True))
            for mode, pool in modes if round_number % 2 else reversed(modes):
                start_time = time.perf_counter()
                pool.starmap(run, runs, chunksize=1)
                if round_number:  # round 0 is the warmup
                    times[mode].append(time.perf_counter() - start_time)
    ratios = sorted(sequential / parallel for parallel, sequential in zip(*times.values(), strict=True))
    ratio = {"median": statistics.median(ratios), "low": ratios[0], "high": ratios[-1]}
    seconds = {mode: statistics.median(values) for mode, values in times.items()}
    if options.json:
        print(json.dumps({"runs": len(runs), "seconds": seconds, "speedup": ratio}))
        return
    print(f"{len(runs)} runs of {options.preset}, {options.steps} steps each")
    print(f"  parallel, 1 thread each {seconds['parallel']:7.2f} s")
    print(f"  sequential, {options.cores} threads   {seconds['sequential']:7.2f} s")
    print(
        f"  speedup of parallel {ratio['median']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f} over "
        f"{options.rounds} rounds)"
    )


if __name__ == "__main__":
    main()
