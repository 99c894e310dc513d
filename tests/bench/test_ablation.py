"""Ablations of second implementations, and the page of their results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from input_errors import raises_code
from qkflow.bench.ablation import ABLATIONS, Ablation, AblationRow, Setup, run_ablation, select_ablations
from qkflow.bench.ablation_page import render_page, update_results
from qkflow.bench.timing import TimeRatio
from qkflow.bench.variants import BenchShape
from qkflow.cli.commands.bench import bench

DOCS = Path(__file__).parents[2] / "docs"
CPU = torch.device("cpu")
SMALL = BenchShape(dim=32, n_heads=4, seq_len=128, batch_size=1, decode_vocab_size=64, decode_n_layers=2)
FAST = [ablation for ablation in ABLATIONS if ablation.uses_torch_memory]


def make_row(name: str = "cache", ratio: float = 1.0, memory: float | None = 1.0) -> AblationRow:
    return AblationRow(name, "block step", TimeRatio(ratio, ratio - 0.1, ratio + 0.1, 0.25, 15), memory)


@pytest.mark.parametrize("ablation", FAST, ids=lambda ablation: f"{ablation.name}, {ablation.case}")
def test_both_implementations_agree(ablation: Ablation) -> None:
    ablation = replace(ablation, round_multiplier=1)
    row = run_ablation(ablation, Setup(SMALL, CPU), rounds=3)  # raises if they differ
    assert row.time.ratio > 0
    assert row.memory_ratio is not None


def test_different_results_are_an_error() -> None:
    ablation = Ablation("wrong", "case", lambda setup: (lambda: torch.ones(2), lambda: torch.zeros(2)))
    with pytest.raises(AssertionError):
        run_ablation(ablation, Setup(SMALL, CPU), rounds=3)


@pytest.mark.parametrize(
    ("ratio", "memory", "verdict"),
    [(1.06, 1.0, "keep"), (1.04, 1.9, "delete"), (0.9, 2.0, "keep"), (1.0, None, "delete")],
)
def test_verdict_needs_speed_or_half_the_memory(ratio: float, memory: float | None, verdict: str) -> None:
    assert make_row(ratio=ratio, memory=memory).verdict == verdict


def test_select_ablations() -> None:
    assert {ablation.name for ablation in select_ablations("chunked loss", CPU)} == {"chunked loss"}
    assert not any(ablation.cpu_only for ablation in select_ablations(None, torch.device("cuda")))
    with raises_code("unknown-ablation"):
        select_ablations("chunked los", CPU)


def test_update_replaces_measured_rows_and_keeps_deleted_ones(tmp_path: Path) -> None:
    path = tmp_path / "ablation.json"
    deleted = {"status": "deleted", "environment": {"torch": "2.9"}, "rows": [make_row("cache").to_dict()]}
    path.write_text(json.dumps({"runs": [deleted]}))
    update_results(path, [make_row("cache", 1.2), make_row("kernel", 1.3)], {"torch": "2.13"})
    results = update_results(path, [make_row("cache", 1.4)], {"torch": "2.14"})
    assert results == json.loads(path.read_text())
    rows = [(run["status"], row["name"], row["ratio"]) for run in results["runs"] for row in run["rows"]]
    assert rows == [("kept", "cache", 1.4), ("kept", "kernel", 1.3), ("deleted", "cache", 1.0)]
    page = render_page(results)
    assert page.index("1.400×") < page.index("## Deleted") < page.index("1.000×")


def test_page_is_rendered_from_the_stored_results() -> None:
    results = json.loads((DOCS / "results" / "ablation.json").read_text("utf-8"))
    assert (DOCS / "ablation.md").read_text("utf-8") == render_page(results)


def test_command_prints_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results" / "ablation.json"
    path.parent.mkdir()
    options = {"variants": "blocked softmax difference", "dim": 32, "n_heads": 4, "seq_len": 128}
    bench(ablate=True, rounds=3, batch_size=1, device="cpu", save=path, json=True, **options)
    printed = json.loads(capsys.readouterr().out)
    assert printed["rows"] == json.loads(path.read_text())["runs"][0]["rows"]
    assert "blocked softmax difference" in (tmp_path / "ablation.md").read_text()


def test_ablation_options_need_ablate() -> None:
    with raises_code("ablate-only-option"):
        bench(clock="process")
