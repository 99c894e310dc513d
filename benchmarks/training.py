"""Speed of a training step, beside Hugging Face's Trainer and a plain PyTorch loop.

    python benchmarks/training.py                          # tiny and small, one thread
    python benchmarks/training.py --presets small --threads 2 --rounds 9

Three variants train the same function on the same batches in the same precision, alternating in one process:
qkflow's loop with schedule, clipping, checks and metrics; `Trainer` on a LlamaForCausalLM with the same
weights; a plain loop over qkflow's model with PyTorch's AdamW and cross-entropy. Printed: time per step,
speedup of qkflow (median and range over rounds). Feed-forwards are SwiGLU as in Llama; `tiny` has a smaller
hidden_dim to keep its parameter count.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peers import llama

from qkflow.data import TrainWindows, prepare
from qkflow.models import Decoder, preset
from qkflow.training import Callback, RunConfig, Trainer, train

SHAPES = {"tiny": {"hidden_dim": 344}, "small": {}}
SEQ_LENS = {"tiny": 128, "small": 256}
LOG_EVERY = 10
Clock = Callable[[], float]


def run_config(name: str, batch_size: int, steps: int, corpus: str) -> RunConfig:
    return RunConfig.from_dict(
        {
            "model": {"preset": name, "feed_forward": "swiglu", **SHAPES[name]},
            "data": {
                "corpus": corpus, "tokenizer": f"bpe:{preset(name).vocab_size}", "seq_len": SEQ_LENS[name],
            },
            "train": {
                "steps": steps, "batch_size": batch_size, "lr": 1e-3, "log_every": LOG_EVERY, "device": "cpu",
                "evaluations": 1, "eval_tokens": 256, "probe_every": 0,
            },
        }
    )  # fmt: skip


class StepTimes(Callback):
    """Records the time at the end of each step."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.ends = clock, list[float]()

    def on_step(self, trainer: Trainer, loss: torch.Tensor) -> None:
        self.ends.append(self.clock())


def run_qkflow(config: RunConfig, clock: Clock) -> list[float]:
    times = StepTimes(clock)
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder), config, times)
    return times.ends


def run_plain_loop(model: Decoder, config: RunConfig, windows: TrainWindows, clock: Clock) -> list[float]:
    """Train the same model with a minimal loop."""
    assert config.train.steps
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.train.steps)
    ends = []
    for step in range(config.train.steps):
        ids = torch.from_numpy(windows.batch(step))
        logits = model.logits(model(ids[:, :-1]))
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % LOG_EVERY == 0:
            loss.item()
        ends.append(clock())
    return ends


class Batches(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Single windows in the order of the other variants. Trainer shifts the labels itself."""

    def __init__(self, windows: TrainWindows, steps: int) -> None:
        rows = [torch.from_numpy(row[:-1].copy()) for step in range(steps) for row in windows.batch(step)]
        self.rows = [{"input_ids": row, "labels": row} for row in rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


def run_hf_trainer(peer: Any, config: RunConfig, batches: Batches, clock: Clock) -> list[float]:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    ends: list[float] = []

    class RecordTimes(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(clock())

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=config.train.steps,
            per_device_train_batch_size=config.train.batch_size,
            learning_rate=1e-3, lr_scheduler_type="cosine", weight_decay=0.1, adam_beta2=0.95,
            max_grad_norm=1.0, logging_steps=LOG_EVERY, save_strategy="no", report_to="none",
            disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        run = Trainer(model=peer, args=arguments, train_dataset=batches, callbacks=[RecordTimes()])
        run.remove_callback(PrinterCallback)
        run.train()
    return ends


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    clock: Clock = time.process_time if options.clock == "process" else time.perf_counter
    config = run_config(name, options.batch_size, options.steps, options.corpus)
    data = prepare(config.data.corpus, config.data.tokenizer)
    windows = TrainWindows(data.tokens("train"), config.data.seq_len, config.train.batch_size, 0)
    model = Decoder(config.model_config(data.vocab_size), seed=0)
    peer = llama(model, config.data.seq_len)
    batches = Batches(windows, options.steps)
    variants: dict[str, Callable[[], list[float]]] = {
        "qkflow": lambda: run_qkflow(config, clock),
        "Trainer": lambda: run_hf_trainer(peer, config, batches, clock),
        "plain loop": lambda: run_plain_loop(model, config, windows, clock),
    }
    times: dict[str, list[float]] = {key: [] for key in variants}
    for round_number in range(options.rounds + 1):
        order = list(variants) if round_number % 2 else list(reversed(variants))
        for key in order:
            ends = variants[key]()
            steps = [after - before for before, after in itertools.pairwise(ends)]
            if round_number:  # round 0 is the warmup
                times[key].append(statistics.median(steps) if options.typical else statistics.fmean(steps))
    tokens = config.train.batch_size * config.data.seq_len
    report: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_per_step": tokens,
    }
    for key, seconds in times.items():
        ratios = sorted(other / mine for other, mine in zip(seconds, times["qkflow"], strict=True))
        report[key] = {
            "milliseconds": 1e3 * statistics.median(seconds),
            "speedup": {
                "median": statistics.median(ratios),
                "low": ratios[0],
                "high": ratios[-1],
            },
        }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--presets", nargs="+", default=["tiny", "small"], choices=list(SHAPES))
    parser.add_argument("--corpus", default="speeches")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--clock", choices=["wall", "process"], default="wall", help="process: CPU time, for a busy machine"
    )
    parser.add_argument("--typical", action="store_true", help="median instead of mean step of a round")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    logging.disable(logging.WARNING)
    report = {name: measure(name, options) for name in options.presets}
    if options.json:
        print(json.dumps({"threads": options.threads, "batch_size": options.batch_size, **report}))
        return
    for name, row in report.items():
        print(f"{name}: {row.pop('parameters'):,} parameters, {row.pop('tokens_per_step')} tokens per step")
        for key, cell in row.items():
            ratio = cell["speedup"]
            print(
                f"  {key:10} {cell['milliseconds']:8.1f} ms/step  speedup of qkflow {ratio['median']:.2f}x "
                f"({ratio['low']:.2f} to {ratio['high']:.2f} over {options.rounds} rounds)"
            )


if __name__ == "__main__":
    main()
