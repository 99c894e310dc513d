"""Interleaved timing and its statistics."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from input_errors import raises_code
from qkflow.bench import time_interleaved
from qkflow.bench.timing import process_clock, summarize_ratios, time_call


def test_summary_is_the_median_ratio_of_pairs() -> None:
    pairs = [(2.0, 1.0), (2.2, 1.0), (30.0, 10.0), (1.8, 1.0), (2.0, 1.0)]
    result = summarize_ratios(pairs)
    assert result.ratio == 2.0
    assert result.low <= 2.0 <= result.high <= 3.0


def test_every_variant_is_called_equally_often() -> None:
    calls = {"reference": 0, "a": 0, "b": 0}

    def call(name: str) -> None:
        calls[name] += 1
        time.sleep(0.0005)

    result = time_interleaved(
        lambda: call("reference"), {"a": lambda: call("a"), "b": lambda: call("b")}, rounds=4, warmup=1
    )
    assert calls == {"reference": 1 + 8, "a": 5, "b": 5}
    assert set(result) == {"a", "b"}


def test_too_few_rounds() -> None:
    with raises_code("too-few-rounds"):
        time_interleaved(lambda: None, {}, rounds=2)


@pytest.mark.skipif(sys.platform == "win32", reason="needs getrusage")
def test_process_clock_ignores_sleep() -> None:
    assert time_call(lambda: time.sleep(0.2), process_clock) < 0.1


PAGE_FAULTS = """
import resource
import torch
from qkflow.bench.timing import disable_malloc_trim

disable_malloc_trim()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(2**24)  # 64 MiB, 16,384 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for _ in range(8):  # until the heap has grown
    faults()
print(faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_freed_memory_is_reused() -> None:
    """In a subprocess, because the allocations of other tests change when malloc asks for new pages."""
    done = subprocess.run([sys.executable, "-c", PAGE_FAULTS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 4 * 16_384 / 10
