"""How to share the cores among runs: one thread each, side by side, or all threads to one run after another.

    python benchmarks/sharing.py                           # tiny, as many runs as there are cores
    python benchmarks/sharing.py --preset small --steps 5

Both ways make the same runs with the same steps in processes that are already warm, taking turns. Printed are
the seconds that all runs together take, and how many times as fast they are side by side: the median and the
range over rounds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from training import SHAPES, run_config

from qkflow.training import train


def run(name: str, batch: int, steps: int, corpus: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder), run_config(name, batch, steps, corpus))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="tiny", choices=list(SHAPES))
    parser.add_argument("--corpus", default="speeches")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30, help="of each run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    runs = [(options.preset, options.batch, options.steps, options.corpus)] * options.cores
    spawn = multiprocessing.get_context("spawn")  # a forked process would inherit threads
    taken: dict[str, list[float]] = {"side by side": [], "one after another": []}
    with (
        spawn.Pool(options.cores, torch.set_num_threads, (1,)) as narrow,
        spawn.Pool(1, torch.set_num_threads, (options.cores,)) as wide,
    ):
        for turn in range(options.rounds + 1):
            ways = list(zip(taken, (narrow, wide), strict=True))
            for way, pool in ways if turn % 2 else reversed(ways):
                began = time.perf_counter()
                pool.starmap(run, runs, chunksize=1)
                if turn:  # the first is to warm up
                    taken[way].append(time.perf_counter() - began)
    ratios = sorted(after / beside for beside, after in zip(*taken.values(), strict=True))
    ratio = {"median": statistics.median(ratios), "low": ratios[0], "high": ratios[-1]}
    seconds = {way: statistics.median(times) for way, times in taken.items()}
    if options.json:
        print(json.dumps({"runs": len(runs), "seconds": seconds, "side_by_side_times_as_fast": ratio}))
        return
    print(f"{len(runs)} runs of {options.preset}, {options.steps} steps each")
    print(f"  side by side, 1 thread each        {seconds['side by side']:7.2f} s")
    print(f"  one after another, {options.cores} threads       {seconds['one after another']:7.2f} s")
    print(
        f"  side by side is {ratio['median']:.2f}x as fast ({ratio['low']:.2f} to {ratio['high']:.2f} over "
        f"{options.rounds} rounds)"
    )


if __name__ == "__main__":
    main()
