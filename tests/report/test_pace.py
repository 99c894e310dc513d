"""Report and tables of a pace study."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from rich.console import Console

from qkflow.report.pace import render_report, write_report
from qkflow.report.pace_tables import CSV_COLUMNS, attribution_table, results_table, summary_csv
from qkflow.studies.pace import PaceStudyConfig, PaceStudyResult, PaceSummary
from qkflow.studies.pace.results import (
    AttributionContrasts,
    MeasureSummary,
    RatioSummary,
    RunCounts,
    StudyFacts,
)
from qkflow.studies.results import CorrectedDifference
from qkflow.studies.stats import paired_difference

HOSTILE = "</script><script>alert(1)</script>"
AOPC = {"comprehensiveness": 0.2, "sufficiency": 0.1}


def ratio_summary(ratio: str, measures: dict[str, MeasureSummary], finished: bool = True) -> RatioSummary:
    deletions = dict.fromkeys(("attention", "rollout", "gradient", "random"), AOPC)
    heatmap = [[0.0, 25.0], [50.0, 25.0]] if finished else None
    return RatioSummary(ratio, [0, 1, 2], measures, heatmap, deletions if finished else {}, 1.0, [HOSTILE])


@pytest.fixture
def summary() -> PaceSummary:
    config = PaceStudyConfig("agreement", data=HOSTILE, confidence=0.9)
    difference = paired_difference([0.6, 0.61, 0.63], [0.2, 0.21, 0.22], confidence=0.9)
    contrast = {"attention_random": difference, "gradient_random": difference}
    corrected = CorrectedDifference(**vars(difference), p_holm=0.001)
    raised = MeasureSummary(0.613, [0.6, 0.61, 0.63], corrected, "raises")
    return PaceSummary(
        config=config,
        command=config.to_command(Path("out")),
        recipe=config.resolve_recipe(),
        facts=StudyFacts(steps=4, train=64, test=30, majority=0.5, vocab_size=9, notes={}),
        baseline="1",
        rows=[
            ratio_summary("1", {"mass": MeasureSummary(0.21, [0.2, 0.21, 0.22])}),
            ratio_summary("10", {"mass": raised}),
            ratio_summary("30", {}, finished=False),
        ],
        explains=[AttributionContrasts(ratio, contrast) for ratio in ("1", "10")],
        published={"performance": (0.9243, 0.9341)},
        runs=RunCounts(planned=9, finished=6, failures=[]),
        curves={"1": {"mass": [(2.0, 0.1, 0.0, 0.2), (4.0, 0.2, 0.1, 0.3)]}},
        environment={"torch": HOSTILE},
        headline=HOSTILE,
        notes=[HOSTILE],
    )


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
