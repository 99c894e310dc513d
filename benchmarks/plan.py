"""The planner beside reality: memory, FLOPs and hours, predicted and measured.

    python benchmarks/plan.py memory                    # tiny, small and 60m: peak of a few steps on a CPU
    python benchmarks/plan.py flops                     # a counted step of tiny, small and 60m
    python benchmarks/plan.py hours --tokens 200k       # a small comparison: the dry run, then the real one

Memory: every case trains in a process of its own. The measured number is the peak resident set size minus its
value before the model was built; a step of a much smaller model runs first, so that libraries are loaded.
glibc's malloc is set to return freed memory to the system. By default it keeps some of it, which
`--malloc default` includes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS = 2
MEMORY_CASES = (("tiny", 64, 128), ("small", 16, 256), ("60m", 8, 512))  # preset, batch_size, seq_len
QUICK_CASES = (("tiny", 16, 128), ("small", 8, 128))


def resident_bytes(field: str) -> int:
    """Return VmRSS (now) or VmHWM (peak) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {field}: this benchmark needs Linux")


def measure_memory(preset_name: str, batch_size: int, seq_len: int, optimizer: str) -> int:
    """Train a few steps. Return the bytes they added to the memory of this process."""
    import torch

    from qkflow.models import Decoder, ModelConfig, preset
    from qkflow.training.muon import Muon, hidden_matrices
    from qkflow.training.optimizer import AdamW, clip_grad_norm, parameter_groups

    torch.set_num_threads(1)

    def train(config: ModelConfig, n_windows: int, steps: int) -> None:
        model = Decoder(config, seed=0)
        groups = parameter_groups(model, 1e-3, 0.1)
        updater = Muon(groups, hidden_matrices(model)) if optimizer == "muon" else AdamW(groups)
        ids = torch.randint(config.vocab_size, (n_windows, seq_len + 1))
        for _ in range(steps):
            updater.zero_grad()
            model.loss(model(ids[:, :-1]), ids[:, 1:]).backward()
            clip_grad_norm(updater.gradients(), 1.0)
            updater.step()

    config = preset(preset_name)
    train(preset(preset_name, n_layers=1, dim=64, n_heads=4, hidden_dim=64, vocab_size=256), 1, 1)
    before = resident_bytes("VmRSS")
    train(config, batch_size, STEPS)
    return resident_bytes("VmHWM") - before


def compare_memory(options: argparse.Namespace) -> list[dict[str, object]]:
    from qkflow.models import preset
    from qkflow.training.memory import estimate_training_memory

    rows = []
    for name, batch_size, seq_len in QUICK_CASES if options.quick else MEMORY_CASES:
        if options.presets and name not in options.presets.split(","):
            continue
        case = [name, str(batch_size), str(seq_len), options.optimizer]
        tuned = {"MALLOC_MMAP_THRESHOLD_": "65536"} if options.malloc == "exact" else {}
        command = [sys.executable, __file__, "measure", *case]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, check=True, text=True, env={**os.environ, **tuned}
        )
        estimate = estimate_training_memory(preset(name), batch_size, seq_len, optimizer=options.optimizer)
        rows.append(
            row(f"{name}, batch_size {batch_size}", estimate.peak / 1e6, int(done.stdout) / 1e6, "MB")
        )
    return rows


def compare_flops(options: argparse.Namespace) -> list[dict[str, object]]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from qkflow.models import Decoder, preset
    from qkflow.models.cost import flops_per_token
    from qkflow.models.loss import linear_cross_entropy_reference

    rows = []
    for name, seq_len in (("tiny", 128), ("small", 256), ("60m", 512)):
        model = Decoder(preset(name), device="meta")
        ids = torch.zeros(1, seq_len, dtype=torch.long, device="meta")
        # the counter of PyTorch knows neither the fused kernel of a CPU nor matmuls in place
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            linear_cross_entropy_reference(model(ids), model.output_weight, ids).backward()
        predicted = flops_per_token(preset(name), seq_len) * seq_len
        rows.append(row(name, predicted / 1e9, counter.get_total_flops() / 1e9, "GFLOP"))
    return rows


def compare_hours(options: argparse.Namespace) -> list[dict[str, object]]:
    from qkflow.bench.timing import process_clock
    from qkflow.studies import compare
    from qkflow.studies.preview import preview

    settings = {
        "variants": "euler",
        "controls": "none",
        "inits": "gpt2",
        "seeds": 3,
        "tokens": options.tokens,
        "preset": options.preset,
    }
    with tempfile.TemporaryDirectory() as folder:
        planned = preview("speeches", out=Path(folder) / "study", **settings)
        clock = time.perf_counter if options.clock == "wall" else process_clock
        start = clock()
        compare("speeches", out=Path(folder) / "study", **settings)
        measured = (clock() - start) / (1 if options.clock == "wall" else planned.jobs)
    return [row(f"{planned.runs} runs of {options.preset}", 3600 * planned.hours, measured, "s")]


def row(case: str, predicted: float, measured: float, unit: str) -> dict[str, object]:
    error = predicted / measured - 1
    return {"case": case, "predicted": predicted, "measured": measured, "unit": unit, "error": error}


def main() -> None:
    if sys.argv[1:2] == ["measure"]:
        preset_name, batch_size, seq_len, optimizer = sys.argv[2:]
        print(measure_memory(preset_name, int(batch_size), int(seq_len), optimizer))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["memory", "flops", "hours"])
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--malloc", choices=["exact", "default"], default="exact")
    parser.add_argument("--presets", help="memory: of these alone, e.g. tiny,small")
    parser.add_argument("--quick", action="store_true", help="memory: tiny and small with smaller batches")
    parser.add_argument("--preset", default="tiny", help="hours: size of the models")
    parser.add_argument("--tokens", default="200k", help="hours: tokens per run")
    parser.add_argument(
        "--clock",
        choices=["wall", "process"],
        default="wall",
        help="hours: process is CPU time per job, for a machine with other load",
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = {"memory": compare_memory, "flops": compare_flops, "hours": compare_hours}[options.what](options)
    if options.json:
        print(json.dumps(rows))
        return
    for each in rows:
        print(
            f"{each['case']:24} predicted {each['predicted']:10.1f} {each['unit']}   "
            f"measured {each['measured']:10.1f} {each['unit']}   {each['error']:+.1%}"
        )


if __name__ == "__main__":
    main()
