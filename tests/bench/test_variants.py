"""The rows of the benchmark, and their check against the reference."""

from __future__ import annotations

import pytest
import torch

from input_errors import raises_code
from qkflow.attention import Attention, couplings
from qkflow.bench.levels import measure_level, rounds_at
from qkflow.bench.variants import (
    LEVELS,
    BenchShape,
    BenchVariant,
    Level,
    all_variants,
    build_module,
    is_mergeable,
    select_variants,
    verify_all,
)

SMALL = BenchShape(
    dim=32, n_heads=4, seq_len=32, batch_size=1, vocab_size=64, decode_vocab_size=64, decode_n_layers=2
)
CPU = torch.device("cpu")


def test_every_registered_coupling_has_a_row() -> None:
    assert {row.coupling.split(":")[0] for row in all_variants()} == set(couplings.names())


def test_mergeable_couplings_have_a_merged_row() -> None:
    merged = {row.coupling for row in all_variants() if row.merged}
    assert merged == {name for name in couplings.names() if is_mergeable(name)} == {"drift"}


def test_select_by_name_or_label() -> None:
    assert [row.label for row in select_variants("leapfrog n=7, drift merged")] == [
        "leapfrog n=7",
        "drift merged",
    ]
    assert len(select_variants("euler")) == 3
    with raises_code("unknown-variant"):
        select_variants("eular")


def test_reference_mismatch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(couplings.get("euler"), "reference", lambda self, q, k: (q, k))
    with raises_code("reference-mismatch"):
        verify_all([BenchVariant("euler", "euler")], SMALL)


def test_all_variants_match_their_reference() -> None:
    errors = verify_all(all_variants(), SMALL)
    assert max(errors.values()) < 1e-10


def test_merged_row_is_standard_attention() -> None:
    row = BenchVariant("drift merged", "drift", merged=True)
    layer = build_module(row, "attention", SMALL, CPU, torch.float32)
    assert isinstance(layer, Attention)
    assert layer.coupling.name == "none"


@pytest.mark.parametrize("level", LEVELS)
def test_measure_level(level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rounds_at(level, 3) == (24 if level == "decode" else 3)
    monkeypatch.setattr("qkflow.bench.levels.ROUND_MULTIPLIER", {})
    rounds: list[int] = []
    variants = [BenchVariant("none"), BenchVariant("affine", "affine", steps=1)]
    rows = measure_level(level, variants, SMALL, 3, CPU, torch.float32, on_round=lambda: rounds.append(1))
    assert [row.variant for row in rows] == ["none", "affine"]
    assert len(rounds) == rows[0].time.rounds == 3
    assert rows[0].flop_ratio == 1
    assert rows[1].flop_ratio > 1
    assert set(rows[1].to_dict()) == {
        *("variant", "steps", "level", "ratio", "low", "high", "milliseconds", "flop_ratio", "memory_ratio")
    }
