"""Findings about the gates of slow path variants."""

from __future__ import annotations

from pathlib import Path

import pytest

from qkflow.studies import Comparison
from qkflow.studies.config import ComparisonConfig
from qkflow.studies.results import ArmSummary, RunCounts, StudySummary
from qkflow.studies.run_data import RunData
from qkflow.studies.slow_path_findings import gate_findings


def comparison(**variants: tuple[list[float], list[float]]) -> Comparison:
    """Build a finished comparison from the last |g| and the losses of every seed, by variant."""
    runs = []
    for name, (gates, losses) in variants.items():
        for seed, (gate, loss) in enumerate(zip(gates, losses, strict=True)):
            probes = [{"step": 1, "slow_gate": [0.0], "slow_share": [0.0]}]
            probes += [{"step": 2, "slow_gate": [gate], "slow_share": [gate / 2, gate / 2]}]
            metrics = {"probe": probes if name != "standard" else [{"step": 1}]}
            result = {"status": "finished", "loss": loss}
            runs.append(RunData(name, "compare", f"{name}@gpt2", seed, 1e-3, 10, result, metrics, ""))
    reference, *others = (ArmSummary(name, "variant", "gpt2", f"{name}@gpt2") for name in variants)
    counts = RunCounts(len(runs), len(runs))
    summary = StudySummary(ComparisonConfig(), "", reference, tuple(others), counts)
    return Comparison(Path(), summary, runs)


def test_gate_findings() -> None:
    variants = {
        "standard": ([0.0] * 3, [4.0, 4.1, 4.2]),
        "slow": ([0.001, 0.002, 0.0015], [4.0, 4.11, 4.19]),
        "slow:warm-gate": ([0.1, 0.12, 0.11], [3.9, 4.0, 4.1]),
    }
    findings = gate_findings(comparison(**variants))
    gates = {row["variant"]: row for row in findings["gates"]}
    assert set(gates) == {"slow", "slow:warm-gate"}
    assert (gates["slow"]["open"], gates["slow:warm-gate"]["open"]) == (False, True)
    assert gates["slow:warm-gate"]["slow_share_last"]["mean"] == pytest.approx(0.055)
    assert gates["slow:warm-gate"]["slow_gate_first"]["mean"] == 0
    (contrast,) = findings["contrasts"]
    assert (contrast["variant"], contrast["against"]) == ("slow:warm-gate", "slow")
    assert contrast["difference"]["mean"] == pytest.approx(-0.1)
    assert findings["sentences"][-1].endswith("helps")
