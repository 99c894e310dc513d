"""Pages of made-up studies, written once for all browser tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from made_pace import pace_summary
from made_study import FINAL, HOSTILE, write_study
from qkflow.report.figure_page import FigureSection, line_figure, line_trace, render_figure_page
from qkflow.report.joint import render_studies
from qkflow.report.pace import render_report as render_pace
from qkflow.report.page import render_report
from qkflow.studies import load_comparison, save_record
from qkflow.studies.config import ComparisonConfig


@pytest.fixture(scope="session")
def study_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = ComparisonConfig(
        variants=("standard", "euler", "leapfrog:n=7"), tokens=200_000, seeds=3, inits=("gpt2", "fan_in")
    )
    return write_study(tmp_path_factory.mktemp("browser") / "study", config, FINAL)


@pytest.fixture(scope="session")
def pages(study_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The address of one page of every kind, by name."""
    folder = tmp_path_factory.mktemp("pages")
    config = ComparisonConfig(
        data=HOSTILE, variants=("standard", "euler@gpt2"), tokens=200_000, seeds=3, inits=("gpt2", "fan_in")
    )
    hostile_folder = write_study(folder / "hostile", config, FINAL, fail="euler@gpt2")
    study, hostile = load_comparison(study_folder), load_comparison(hostile_folder)
    save_record(study_folder, folder / "record.json")
    trace = line_trace("<b>bold</b> & more", [1, 2], [3, 4])
    section = FigureSection("<i>A section</i>", "1 < 2", {"<u>title</u>": line_figure([trace], "x")})
    texts = {
        "report": render_report(study),
        "hostile": render_report(hostile),
        "record": render_report(load_comparison(folder / "record.json")),
        "studies": render_studies([study, hostile]),
        "pace": render_pace(pace_summary()),
        "figures": render_figure_page("<script>alert(1)</script>", [section], "An introduction."),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in texts}
