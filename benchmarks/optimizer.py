"""Cost of an optimizer in a training step: Muon beside AdamW.

    python benchmarks/optimizer.py                        # small, 16 windows of 128 tokens, one thread
    python benchmarks/optimizer.py --preset tiny --threads 2

Both variants train their own copy of one model on the same batches with qkflow's step (forward, backward,
clipping, update), alternating step by step in one process. Printed: time per step, of which the update of the
weights, and the ratio to AdamW (median and quartiles over rounds).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from qkflow.data import TrainWindows, prepare
from qkflow.models import Decoder, preset
from qkflow.training import TrainConfig
from qkflow.training.distributed import DistContext
from qkflow.training.step import Stepper

OPTIMIZERS = ("adamw", "muon")
Clock = Callable[[], float]


class TimedStepper(Stepper):
    """Records the seconds of every step and of its update."""

    def __init__(self, *arguments: Any, clock: Clock) -> None:
        super().__init__(*arguments)
        self.clock, self.update_seconds = clock, 0.0
        update = self.optimizer.step

        def timed_update() -> None:
            start = clock()
            update()
            self.update_seconds = clock() - start

        self.optimizer.step = timed_update  # type: ignore[method-assign]

    def timed_step(self, step: int) -> tuple[float, float]:
        start = self.clock()
        self.step(step, self.config.lr, 0.5)
        return self.clock() - start, self.update_seconds


def measure(options: argparse.Namespace) -> dict[str, Any]:
    clock: Clock = time.process_time if options.clock == "process" else time.perf_counter
    model = preset(options.preset)
    data = prepare(options.corpus, f"bpe:{model.vocab_size}")
    windows = TrainWindows(data.tokens("train"), options.seq_len, options.batch_size, 0)
    steppers = {}
    for name in OPTIMIZERS:
        config = TrainConfig(batch_size=options.batch_size, lr=1e-3, optimizer=name)
        decoder = Decoder(preset(options.preset, vocab_size=data.vocab_size), seed=0)
        context = DistContext(torch.device("cpu"))
        steppers[name] = TimedStepper(decoder, config, windows, context, clock=clock)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in OPTIMIZERS}
    for step in range(options.rounds + 2):
        for name in OPTIMIZERS if step % 2 else OPTIMIZERS[::-1]:
            seconds = steppers[name].timed_step(step)
            if step >= 2:  # two steps of warmup
                times[name].append(seconds)
    report = {}
    for name, rows in times.items():
        ratios = [mine[0] / base[0] for mine, base in zip(rows, times["adamw"], strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        report[name] = {
            "milliseconds": 1e3 * statistics.median(total for total, _ in rows),
            "update_milliseconds": 1e3 * statistics.median(update for _, update in rows),
            "ratio": {"median": median, "low": low, "high": high},
        }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="small")
    parser.add_argument("--corpus", default="speeches")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--clock", choices=["wall", "process"], default="wall", help="process: CPU time, for a busy machine"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    report = measure(options)
    if options.json:
        print(json.dumps({"preset": options.preset, "threads": options.threads, **report}))
        return
    tokens = options.batch_size * options.seq_len
    print(f"{options.preset}, {tokens} tokens per step, {options.threads} threads, {options.clock} time")
    for name, row in report.items():
        ratio = row["ratio"]
        print(
            f"  {name:6} {row['milliseconds']:8.1f} ms/step, update {row['update_milliseconds']:7.1f} ms, "
            f"{ratio['median']:.3f}x AdamW (quartiles {ratio['low']:.3f} to {ratio['high']:.3f})"
        )


if __name__ == "__main__":
    main()
