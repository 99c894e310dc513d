"""Time ratios on a noisy machine: variants are interleaved with a reference in one process.

One round of a variant is the time of one call divided by the time of a call of the reference directly before
or after it, in random order, so that other load on the machine affects both. Reported is the median ratio
over rounds with a bootstrap interval of the median.
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
Clock = Callable[[], float]


@dataclass(frozen=True)
class TimeRatio:
    """Time relative to the reference (below 1 is faster), with a 95% interval, and seconds per call."""

    ratio: float
    low: float
    high: float
    seconds: float
    rounds: int

    def rounded(self) -> dict[str, float]:
        """Return the values for a table or a JSON file."""
        return {
            "ratio": round(self.ratio, 4),
            "low": round(self.low, 4),
            "high": round(self.high, 4),
            "milliseconds": round(1e3 * self.seconds, 3),
        }


def time_interleaved(
    reference: TimedFn,
    variants: Mapping[str, TimedFn],
    *,
    rounds: int = 15,
    warmup: int = 3,
    seed: int = 0,
    clock: Clock = time.perf_counter,
    on_round: Callable[[], None] | None = None,
) -> dict[str, TimeRatio]:
    """Return the time of every variant relative to the reference."""
    if rounds < 3:
        raise InputError(f"rounds must be at least 3 for an interval, not {rounds}", code="too-few-rounds")
    rng = random.Random(seed)
    disable_malloc_trim()
    for _ in range(warmup):
        for fn in (reference, *variants.values()):
            fn()
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    gc_enabled = gc.isenabled()
    gc.disable()  # a collection inside one call is not the cost of that call
    try:
        for _ in range(rounds):
            for name in rng.sample(list(variants), len(variants)):
                if rng.random() < 0.5:
                    base = time_call(reference, clock)
                    variant = time_call(variants[name], clock)
                else:
                    variant = time_call(variants[name], clock)
                    base = time_call(reference, clock)
                pairs[name].append((variant, base))
            gc.collect()
            if on_round is not None:
                on_round()
    finally:
        if gc_enabled:
            gc.enable()
    return {name: summarize_ratios(times, seed) for name, times in pairs.items()}


def disable_malloc_trim() -> None:
    """Make glibc keep freed memory instead of returning it to the system, for the rest of the process.

    Otherwise most calls page-fault large tensors in again. That can take a third of the time of a call, and
    which call pays depends on the one before. On other systems this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**30)


def process_clock() -> float:
    """Return the CPU seconds of this process and its finished children, which other load affects little."""
    import resource

    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def time_call(fn: TimedFn, clock: Clock = time.perf_counter) -> float:
    begin = clock()
    fn()
    return clock() - begin


def summarize_ratios(times: list[tuple[float, float]], seed: int = 0) -> TimeRatio:
    """Return the median ratio of (variant, reference) times with a bootstrap interval."""
    ratios = [variant / base for variant, base in times]
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    return TimeRatio(
        ratio=statistics.median(ratios),
        low=medians[50],
        high=medians[1949],
        seconds=statistics.median(variant for variant, _ in times),
        rounds=len(ratios),
    )
