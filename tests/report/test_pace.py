"""Report and tables of a pace study."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from rich.console import Console

from made_pace import HOSTILE, pace_summary
from qkflow.report.pace import render_report, write_report
from qkflow.report.pace_tables import CSV_COLUMNS, attribution_table, results_table, summary_csv
from qkflow.studies.pace import PaceStudyResult, PaceSummary


@pytest.fixture
def summary() -> PaceSummary:
    return pace_summary()


def test_report_escapes_text_and_needs_no_network(summary: PaceSummary) -> None:
    page = render_report(summary)
    assert HOSTILE not in page
    assert "http://" not in page.split("<script>")[0]
    assert page.count('class="plot"') == 3, "two heatmaps, one curve"


def test_report_and_table_name_the_confidence_level(summary: PaceSummary) -> None:
    page = render_report(summary)
    assert "90% t-intervals" in page
    assert "95%" not in page.split("<script>")[0]
    assert "90% interval" in str(attribution_table(summary).caption)


def test_terminal_table_marks_significant_differences(summary: PaceSummary) -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(results_table(summary))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert any(line.split()[:3] == ["10", "–", "0.613↑"] for line in lines)
    assert any("published, faster" in line and "0.934" in line for line in lines)


def test_csv_has_one_line_per_ratio_and_measure(summary: PaceSummary) -> None:
    rows = list(csv.DictReader(io.StringIO(summary_csv(summary))))
    assert tuple(rows[0]) == CSV_COLUMNS
    assert [(row["ratio"], row["measure"], row["verdict"]) for row in rows] == [
        ("1", "mass", ""),
        ("10", "mass", "raises"),
    ]


def test_write_report(summary: PaceSummary, tmp_path: Path) -> None:
    write_report(PaceStudyResult(tmp_path, summary))
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "summary.csv"}
