"""The benchmark itself: fair pairs, right sums, and no timing of what is wrong."""

from __future__ import annotations

import resource
import sys
import time

import pytest
import torch

from qkflow.attention import couplings
from qkflow.bench import time_interleaved
from qkflow.bench.memory import peak_memory_bytes
from qkflow.bench.timing import disable_malloc_trim, summarize_ratios
from qkflow.bench.variants import BenchShape, BenchVariant, all_variants, build_module, verify_all
from qkflow.errors import InputError
from qkflow.models.cost import count_flops

SMALL = BenchShape(dim=32, n_heads=4, seq_len=16, batch_size=1)


def test_every_registered_coupling_competes() -> None:
    assert {row.coupling.split(":")[0] for row in all_variants()} == set(couplings.names())


def test_a_wrong_contestant_stops_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    euler = couplings.get("euler")
    monkeypatch.setattr(euler, "reference", lambda self, q, k: (q, k))
    with pytest.raises(InputError, match="nothing is timed until it is correct"):
        verify_all([BenchVariant("euler", "euler")], SMALL)


def test_right_contestants_pass() -> None:
    errors = verify_all(all_variants(), SMALL)
    assert max(errors.values()) < 1e-10


def test_a_merged_drift_is_plain_attention() -> None:
    row = BenchVariant("drift merged", "drift", merged=True)
    layer = build_module(row, "attention", SMALL, torch.device("cpu"), torch.float32)
    assert layer.coupling.name == "none"


def test_the_median_ratio_of_pairs() -> None:
    pairs = [(2.0, 1.0), (2.2, 1.0), (30.0, 10.0), (1.8, 1.0), (2.0, 1.0)]
    result = summarize_ratios(pairs)
    assert result.ratio == 2.0
    assert result.low <= 2.0 <= result.high <= 3.0


def test_interleaving_calls_everyone_equally_often() -> None:
    calls = {"reference": 0, "a": 0, "b": 0}

    def call(name: str) -> None:
        calls[name] += 1
        time.sleep(0.0005)

    result = time_interleaved(
        lambda: call("reference"), {n: lambda n=n: call(n) for n in "ab"}, rounds=4, warmup=1
    )
    assert calls == {"reference": 1 + 8, "a": 5, "b": 5}
    assert set(result) == {"a", "b"}


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc is meant")
def test_freed_memory_is_kept() -> None:
    disable_malloc_trim()

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(4):
            torch.ones(2**24)  # 64 MiB, 16,384 pages
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    faults()
    assert faults() < 4 * 16_384 / 10


def test_peak_memory_counts_what_is_held_at_once() -> None:
    def hold() -> None:
        a = torch.ones(1000, 250)  # 1 MB
        b = a + 1
        del a
        c = b + 1
        del b, c

    assert peak_memory_bytes(hold, torch.device("cpu")) == pytest.approx(2e6, rel=0.01)


def test_flops_of_a_known_layer() -> None:
    layer = torch.nn.Linear(8, 16, bias=False)
    assert count_flops(lambda: layer(torch.randn(4, 8))) == 2 * 4 * 8 * 16


def test_flops_include_fused_attention() -> None:
    q = torch.randn(1, 2, 8, 4, requires_grad=True)
    forward = 2 * 2 * 2 * 8 * 8 * 4

    def both() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()

    assert count_flops(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q)) == forward
    assert count_flops(both) == forward + 5 * forward // 2
