"""`qkflow bench`: what each part costs beside standard attention."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from rich.table import Table

from qkflow.bench.memory import peak_memory_bytes
from qkflow.bench.timing import TimeRatio, time_interleaved
from qkflow.bench.variants import (
    LEVELS,
    ROUND_MULTIPLIER,
    STANDARD,
    BenchShape,
    BenchVariant,
    build_module,
    make_decode_step,
    make_training_step,
    select_variants,
    share_equal_weights,
    verify_all,
)
from qkflow.console import emit_json, out, progress_bar
from qkflow.errors import InputError
from qkflow.models import Decoder
from qkflow.models.cost import count_flops
from qkflow.models.cpu_decoder import PackedWeights
from qkflow.system import collect_env, resolve_device


def bench(
    level: Literal["all", "attention", "block", "model", "decode"] = "all",
    variants: str | None = None,
    dim: int = 512,
    n_heads: int = 8,
    n_kv_heads: int | None = None,
    seq_len: int = 512,
    batch_size: int = 4,
    threads: int | None = None,
    rounds: int | None = None,
    device: str = "auto",
    precision: Literal["fp32", "bf16"] = "fp32",
    quick: bool = False,
    json: bool = False,
) -> None:
    """Time every coupling and scoring against standard attention, interleaved in one process.

    Each is checked against its textbook reference first; nothing is timed while one is wrong. A ratio
    above 1 is slower than standard; the interval is 95%. `none` is standard against itself: the noise.

    Examples:
      qkflow bench --level block
      qkflow bench --level attention --variants euler,leapfrog --rounds 30
      qkflow bench --level decode --json

    Args:
        level: What is timed: the attention module, a transformer block, a whole model's training step, or
            decoding with a cache; all four by default.
        variants: Comma-separated rows, e.g. "euler,leapfrog n=7,differential"; every row by default.
        width: Width of the residual stream.
        heads: Query heads.
        kv_heads: Key/value heads; as many as query heads by default.
        length: Tokens a sequence.
        batch: Sequences a step.
        threads: CPU threads; PyTorch's own choice by default.
        rounds: Paired timings a row; in decoding, whose calls are short, eight times as many.
        device: auto, cpu, cuda or mps.
        precision: fp32 or bf16.
        quick: Fewer rounds and a smaller batch: a first look in under a minute.
        json: Print one JSON object instead of tables.
    """
    if threads is not None:
        if threads < 1:
            raise InputError(f"--threads must be at least 1, not {threads}")
        torch.set_num_threads(threads)
    where = resolve_device(device)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    shape = BenchShape(
        dim=dim, n_heads=n_heads, n_kv_heads=n_kv_heads, seq_len=seq_len, batch_size=batch_size
    )
    if quick:
        shape = dataclasses.replace(shape, batch_size=1, seq_len=min(seq_len, 256), decode_n_layers=2)
    rounds = rounds or (5 if quick else 15)
    rows = select_variants(variants)
    verify_all(rows, shape)
    levels = LEVELS if level == "all" else (level,)
    table = [row for name in levels for row in measure_level(name, rows, shape, rounds, where, dtype)]
    environment = describe_environment(where, precision, shape, rounds)
    if json:
        emit_json({"rows": table, "environment": environment})
        return
    for name in levels:
        out.print(results_table(name, [row for row in table if row["level"] == name]))
    out.print("environment: " + ", ".join(f"{key} {value}" for key, value in environment.items()))


def measure_level(
    level: str,
    variants: list[BenchVariant],
    shape: BenchShape,
    rounds: int,
    device: torch.device,
    dtype: torch.dtype,
) -> list[dict[str, Any]]:
    """One level's rows: time, FLOPs and memory, each as a ratio to standard."""

    plain = build_module(STANDARD, level, shape, device, dtype)
    layouts = PackedWeights()

    def prepare(row: BenchVariant) -> Any:
        module = plain if row is STANDARD else build_module(row, level, shape, device, dtype)
        if level == "decode":
            assert isinstance(module, Decoder)
            assert isinstance(plain, Decoder)
            share_equal_weights(module, plain)
            call = make_decode_step(module, shape, device, layouts)
        else:
            call = make_training_step(module, level, shape, device, dtype)
        if device.type != "cuda":
            return call

        def finished() -> None:
            call()
            torch.cuda.synchronize(device)

        return finished

    standard = prepare(STANDARD)
    calls = {row.label: prepare(row) for row in variants}
    rounds *= ROUND_MULTIPLIER.get(level, 1)
    with progress_bar() as bar:
        task = bar.add_task(f"{level}: timing {len(variants)} rows", total=rounds)
        times = time_interleaved(standard, calls, rounds=rounds, on_round=lambda: bar.advance(task))
    flops, memory = count_flops(standard), peak_memory_bytes(standard, device)
    result = []
    for row in variants:
        call = calls[row.label]
        result.append(
            {
                "variant": row.name,
                "steps": row.steps,
                "level": level,
                **_rounded_ratio(times[row.label]),
                "flop_ratio": round(count_flops(call) / flops, 4),
                "memory_ratio": round(peak_memory_bytes(call, device) / memory, 4),
            }
        )
    return result


def _rounded_ratio(ratio: TimeRatio) -> dict[str, float]:
    return {
        "ratio": round(ratio.ratio, 4),
        "low": round(ratio.low, 4),
        "high": round(ratio.high, 4),
        "milliseconds": round(1e3 * ratio.seconds, 3),
    }


def results_table(level: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"{level}: time relative to standard attention (1.00 = equal, lower is better)")
    table.add_column("variant")
    for heading in ("n", "ratio", "95% interval", "FLOP limit", "memory", "ms"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["variant"],
            str(row["steps"] or ""),
            f"{row['ratio']:.3f}×",
            f"{row['low']:.3f}…{row['high']:.3f}",
            f"{row['flop_ratio']:.3f}×",
            f"{row['memory_ratio']:.3f}×",
            f"{row['milliseconds']:.1f}",
        )
    return table


def describe_environment(
    device: torch.device, precision: str, shape: BenchShape, rounds: int
) -> dict[str, Any]:
    return {**collect_env(device), "precision": precision, "rounds": rounds, **dataclasses.asdict(shape)}
