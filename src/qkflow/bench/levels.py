"""Time, FLOPs and memory of all variants at one level, each relative to standard attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from qkflow.bench.memory import peak_memory_bytes
from qkflow.bench.timing import TimedFn, TimeRatio, time_interleaved
from qkflow.bench.variants import (
    ROUND_MULTIPLIER,
    STANDARD,
    BenchShape,
    BenchVariant,
    Level,
    build_module,
    make_decode_step,
    make_training_step,
    share_equal_weights,
)
from qkflow.models import Decoder
from qkflow.models.cost import count_flops
from qkflow.models.cpu_decoder import PackedWeights


@dataclass(frozen=True)
class BenchRow:
    """Cost of one variant at one level, as ratios to standard attention."""

    variant: str
    steps: int | None
    level: Level
    time: TimeRatio
    flop_ratio: float
    memory_ratio: float

    def to_dict(self) -> dict[str, Any]:
        row = {key: value for key, value in asdict(self).items() if key != "time"}
        return {
            **row,
            **self.time.rounded(),
            "flop_ratio": round(self.flop_ratio, 4),
            "memory_ratio": round(self.memory_ratio, 4),
        }


def rounds_at(level: Level, rounds: int) -> int:
    """Return the number of rounds at a level."""
    return rounds * ROUND_MULTIPLIER.get(level, 1)


def measure_level(
    level: Level,
    variants: list[BenchVariant],
    shape: BenchShape,
    rounds: int,
    device: torch.device,
    dtype: torch.dtype,
    on_round: Callable[[], None] | None = None,
) -> list[BenchRow]:
    """Measure every variant against standard attention."""
    standard_module = build_module(STANDARD, level, shape, device, dtype)
    packed_weights = PackedWeights()

    def make_step(variant: BenchVariant) -> TimedFn:
        module = standard_module
        if variant is not STANDARD:
            module = build_module(variant, level, shape, device, dtype)
        if level == "decode":
            assert isinstance(module, Decoder)
            share_equal_weights(module, standard_module)
            return synchronized(make_decode_step(module, shape, device, packed_weights), device)
        return synchronized(make_training_step(module, level, shape, device, dtype), device)

    standard = make_step(STANDARD)
    steps = {variant.label: make_step(variant) for variant in variants}
    times = time_interleaved(standard, steps, rounds=rounds_at(level, rounds), on_round=on_round)
    flops, memory = count_flops(standard), peak_memory_bytes(standard, device)
    return [
        BenchRow(
            variant=variant.name,
            steps=variant.steps,
            level=level,
            time=times[variant.label],
            flop_ratio=count_flops(steps[variant.label]) / flops,
            memory_ratio=peak_memory_bytes(steps[variant.label], device) / memory,
        )
        for variant in variants
    ]


def synchronized(fn: TimedFn, device: torch.device) -> TimedFn:
    """Return `fn` with a wait for the device at the end, where kernels run asynchronously."""
    if device.type == "cpu":
        return fn

    def run() -> object:
        result = fn()
        torch.accelerator.synchronize(device)
        return result

    return run
