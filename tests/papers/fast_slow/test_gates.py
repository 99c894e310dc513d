"""The table of gates: one row per slow path of the stored studies."""

from __future__ import annotations

from qkflow.papers.claims import Results
from qkflow.papers.fast_slow.gates import gate_rows
from qkflow.studies.slow_path_findings import OPEN_GATE_THRESHOLD


def test_rows() -> None:
    rows = gate_rows(Results())
    assert [(row["tokens"], row["slow path"]) for row in rows] == [
        ("500k", "`slow`"),
        ("500k", "`slow:frozen`"),
        ("500k", "`slow`"),
        ("500k", "`slow:pool_after=1`"),
    ]
    for row in rows:
        low = float(row["‖g⊙ũ‖/‖x‖ (95%)"].partition("(")[2].partition("…")[0])
        assert (row["open"] == "yes") == (low > OPEN_GATE_THRESHOLD)
