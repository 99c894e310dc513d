"""`qkflow bench`: time, FLOPs and memory of each part relative to standard attention."""

from __future__ import annotations

import dataclasses
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from rich.table import Table

from qkflow.bench.ablation import Ablation, AblationRow, Setup, run_ablation, select_ablations
from qkflow.bench.ablation_page import update_results, write_page
from qkflow.bench.levels import BenchRow, measure_level, rounds_at
from qkflow.bench.timing import process_clock
from qkflow.bench.variants import LEVELS, BenchShape, Level, select_variants, verify_all
from qkflow.config_io import THREADS, Range
from qkflow.console import emit_json, out, progress_bar
from qkflow.errors import InputError
from qkflow.system import collect_env, resolve_device

Size = Annotated[int, Range(1, 10**5)]


def bench(
    level: Literal["all", "attention", "block", "model", "decode"] = "all",
    variants: str | None = None,
    dim: Size = 512,
    n_heads: Size = 8,
    n_kv_heads: Size | None = None,
    seq_len: Size = 512,
    batch_size: Size = 4,
    threads: Annotated[int, THREADS] | None = None,
    rounds: Annotated[int, Range(1, 10**6, cost="a round takes milliseconds to seconds")] | None = None,
    device: str = "auto",
    precision: Literal["fp32", "bf16"] = "fp32",
    quick: bool = False,
    ablate: bool = False,
    clock: Literal["wall", "process"] = "wall",
    save: Path | None = None,
    json: bool = False,
) -> None:
    """Time every coupling and scoring against standard attention, interleaved in one process.

    Each is checked against its reference first; if one differs, nothing is timed. A ratio above 1 is
    slower than standard; the interval is 95%. `none` is standard attention against itself: the noise level.

    With --ablate, every second implementation (custom autograd function, packed weights, cache) is timed
    against the plain one. It is worth keeping if it is 5% faster or halves memory.

    examples:
      qkflow bench --level block
      qkflow bench --level attention --variants euler,leapfrog --rounds 30
      qkflow bench --level decode --json
      qkflow bench --ablate --threads 1 --clock process

    Args:
        level: what is timed: the attention module, a transformer block, the training step of a model, or
            decoding with a cache.
        variants: comma-separated rows, e.g. "euler,leapfrog n=7,differential", or names of ablations
            (default: all).
        dim: size of the residual stream.
        n_heads: query heads.
        n_kv_heads: key/value heads (default: as many as query heads).
        seq_len: tokens per sequence.
        batch_size: sequences per step.
        threads: CPU threads (default: all cores).
        rounds: paired timings per row (default: 15, with --quick 5); decoding has eight times as many,
            because its calls are short.
        device: auto, cpu, cuda or mps.
        precision: fp32 or bf16; ablations run in fp32.
        quick: fewer rounds and a smaller batch, for a first result in under a minute.
        ablate: time second implementations against plain ones instead of variants.
        clock: for ablations: wall-clock time, or CPU time of the process, which other load affects less (use
            it with --threads 1).
        save: for ablations: JSON file to update with the results; a page is rendered from it
            (docs/results/ablation.json gives docs/ablation.md).
        json: print one JSON object instead of tables.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if not ablate and (clock != "wall" or save is not None):
        raise InputError("--clock and --save need --ablate", code="ablate-only-option")
    torch_device = resolve_device(device)
    shape = BenchShape(
        dim=dim, n_heads=n_heads, n_kv_heads=n_kv_heads, seq_len=seq_len, batch_size=batch_size
    )
    if quick:
        shape = dataclasses.replace(shape, batch_size=1, seq_len=min(seq_len, 256), decode_n_layers=2)
    rounds = rounds or (5 if quick else 15)
    environment = {**collect_env(torch_device), "precision": precision, "rounds": rounds}
    environment |= dataclasses.asdict(shape)
    if ablate:
        environment |= {"precision": "fp32", "clock": clock}
        ablations = select_ablations(variants, torch_device)
        rows = measure_ablations(ablations, Setup(shape, torch_device), rounds, clock)
        if save is not None:
            write_page(save.parent.parent / f"{save.stem}.md", update_results(save, rows, environment))
        show([row.to_dict() for row in rows], [ablation_table(rows)], environment, json)
        return
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    selected = select_variants(variants)
    verify_all(selected, shape)
    tables = {}
    for name in LEVELS if level == "all" else (level,):
        with progress_bar() as bar:
            task = bar.add_task(f"{name}: timing {len(selected)} variants", total=rounds_at(name, rounds))
            advance = partial(bar.advance, task)
            tables[name] = measure_level(name, selected, shape, rounds, torch_device, dtype, advance)
    all_rows = [row.to_dict() for bench_rows in tables.values() for row in bench_rows]
    show(all_rows, [level_table(*item) for item in tables.items()], environment, json)


def show(rows: list[dict[str, Any]], tables: list[Table], environment: dict[str, Any], json: bool) -> None:
    if json:
        emit_json({"rows": rows, "environment": environment})
        return
    for table in tables:
        out.print(table)
    out.print("environment: " + ", ".join(f"{key} {value}" for key, value in environment.items()))


def measure_ablations(
    ablations: list[Ablation], setup: Setup, rounds: int, clock: Literal["wall", "process"]
) -> list[AblationRow]:
    rows = []
    with progress_bar() as bar:
        for ablation in ablations:
            task = bar.add_task(f"{ablation.name}: {ablation.case}", total=rounds * ablation.round_multiplier)
            rows.append(
                run_ablation(
                    ablation,
                    setup,
                    rounds,
                    clock=process_clock if clock == "process" else time.perf_counter,
                    on_round=partial(bar.advance, task),
                )
            )
    return rows


def level_table(level: Level, rows: list[BenchRow]) -> Table:
    table = Table(title=f"{level}: time relative to standard attention (1.00 = equal, lower is better)")
    table.add_column("variant")
    for heading in ("n", "ratio", "95% interval", "FLOP limit", "memory", "ms"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.variant,
            str(row.steps or ""),
            f"{row.time.ratio:.3f}×",
            f"{row.time.low:.3f}…{row.time.high:.3f}",
            f"{row.flop_ratio:.3f}×",
            f"{row.memory_ratio:.3f}×",
            f"{1e3 * row.time.seconds:.1f}",
        )
    return table


def ablation_table(rows: list[AblationRow]) -> Table:
    table = Table(title="plain implementation relative to ours (above 1.00 ours is better)")
    table.add_column("implementation")
    table.add_column("case")
    for heading in ("time", "95% interval", "memory", "ms"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    for row in rows:
        table.add_row(
            row.name,
            row.case,
            f"{row.time.ratio:.3f}×",
            f"{row.time.low:.3f}…{row.time.high:.3f}",
            "" if row.memory_ratio is None else f"{row.memory_ratio:.2f}×",
            f"{1e3 * row.time.seconds:.1f}",
            row.verdict,
        )
    return table
