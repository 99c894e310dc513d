"""Ratios on a noisy machine: variants take turns in one process, each right beside the reference.

A contestant's round is the time of one call divided by the time of a call of the reference made just
before or just after it, in random order, so that whatever else the machine does hits both. The ratio
reported is the median over rounds, its interval a bootstrap of that median.
"""

from __future__ import annotations

import ctypes
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qkflow.errors import InputError

TimedFn = Callable[[], object]


@dataclass(frozen=True)
class TimeRatio:
    """Time relative to the reference (below 1 is faster), with a 95% interval, and seconds per call."""

    ratio: float
    low: float
    high: float
    seconds: float
    rounds: int


def time_interleaved(
    reference: TimedFn,
    variants: Mapping[str, TimedFn],
    *,
    rounds: int = 15,
    warmup: int = 3,
    seed: int = 0,
    on_round: Callable[[], None] | None = None,
) -> dict[str, TimeRatio]:
    """Time every contestant against the reference."""
    if rounds < 3:
        raise InputError(f"a ratio with an interval needs at least 3 rounds, not {rounds}")
    order = random.Random(seed)
    disable_malloc_trim()
    for _ in range(warmup):
        for call in (reference, *variants.values()):
            call()
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    collecting = gc.isenabled()
    gc.disable()  # a collection that lands on one contestant is not its cost
    try:
        for _ in range(rounds):
            for name in order.sample(list(variants), len(variants)):
                if order.random() < 0.5:
                    base = time_call(reference)
                    own = time_call(variants[name])
                else:
                    own = time_call(variants[name])
                    base = time_call(reference)
                pairs[name].append((own, base))
            gc.collect()
            if on_round is not None:
                on_round()
    finally:
        if collecting:
            gc.enable()
    return {name: summarize_ratios(times, seed) for name, times in pairs.items()}


def disable_malloc_trim() -> None:
    """Ask glibc to keep what is freed instead of giving it back to the system, for the rest of the process.

    Large tensors would be faulted in anew in most calls; that can take a third of a call's time, and who pays
    depends on who ran before. Other systems and libraries have no such wish to express.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3  # their numbers in malloc.h
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**30)


def time_call(fn: TimedFn) -> float:
    begin = time.perf_counter()
    fn()
    return time.perf_counter() - begin


def summarize_ratios(times: list[tuple[float, float]], seed: int = 0) -> TimeRatio:
    """Median of the paired ratios with a bootstrap interval."""
    ratios = [own / base for own, base in times]
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return TimeRatio(
        ratio=statistics.median(ratios),
        low=medians[50],
        high=medians[1949],
        seconds=statistics.median(own for own, _ in times),
        rounds=len(ratios),
    )
