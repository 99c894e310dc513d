"""Reports of studies: report.html, JSON, CSV and a terminal table. Takes `studies.results`; runs nothing.

figures       Plotly figures as plain dicts; also difference_figures, layer_figures
alternatives  the same figures as tables of text
tables        CSV files, the terminal table, number formats
document      the frame of every page: templates, compressed scripts, content security policy
page          report.html of a comparison; pace: of a pace study; joint: of several; figure_page: of figures
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qkflow.studies import Comparison


def write_outputs(comparison: Comparison) -> None:
    """Write summary.json, summary.csv, curves.csv and report.html into the study's folder.

    With fine-tuned models, also finetune.csv.
    """
    from qkflow.files import write_atomic, write_json
    from qkflow.report.finetune import finetune_csv
    from qkflow.report.page import render_report
    from qkflow.report.tables import curves_csv, summary_csv

    folder, summary, runs = comparison.folder, comparison.summary, comparison.compared_runs
    write_json(folder / "summary.json", summary.to_dict())
    write_atomic(folder / "summary.csv", summary_csv(summary))
    write_atomic(folder / "curves.csv", curves_csv(runs))
    if summary.finetune:
        write_atomic(folder / "finetune.csv", finetune_csv(summary.finetune))
    write_atomic(folder / "report.html", render_report(comparison))
