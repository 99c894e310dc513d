"""The table of ratios on labeled tasks, from the stored outputs of `qkflow pace study`."""

from __future__ import annotations

import pytest

from qkflow.papers.claims import Results, find_row
from qkflow.papers.faster_qk.tasks import MEASURES, TASKS, task_rows


@pytest.mark.parametrize("task", TASKS)
def test_every_ratio_has_the_stored_values(task: str) -> None:
    results = Results()
    output = results.output(f"pace-{task}")
    rows = [row for row in task_rows(results) if row["task"] == task]
    assert [row["r"] for row in rows] == [row["ratio"] for row in output["rows"]]
    for row in rows:
        stored = find_row(output["rows"], "ratio", row["r"])
        for name, label in MEASURES.items():
            assert row[label].startswith(f"{stored['measures'][name]['mean']:.3g}")
            assert ("…" in row[label]) == (row["r"] != output["baseline"])
