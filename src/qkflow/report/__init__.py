"""Reports: what a study found, for people (report.html, a terminal table) and for programs (JSON, CSV).

Takes the plain summary of a study and its runs; knows nothing of how they came about.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qkflow.studies.analysis import RunData


def write_outputs(folder: Path, summary: dict[str, Any], runs: Sequence[RunData]) -> None:
    """Write summary.json, summary.csv, curves.csv and report.html into a study's folder."""
    from qkflow.files import write_atomic, write_json
    from qkflow.report.page import render_report
    from qkflow.report.tables import curves_csv, summary_csv

    write_json(folder / "summary.json", summary)
    write_atomic(folder / "summary.csv", summary_csv(summary))
    write_atomic(folder / "curves.csv", curves_csv(runs))
    write_atomic(folder / "report.html", render_report(summary, runs))
