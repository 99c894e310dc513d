"""`qkflow report`: rebuild the outputs of a study from its folder."""

from __future__ import annotations

from pathlib import Path

import tyro


def report(folder: tyro.conf.Positional[Path], json: bool = False) -> int:
    """Rebuild report.html, summary.json, summary.csv and curves.csv from the runs in a study's folder.

    Nothing is trained. The study may still be running; the report then covers its finished runs.

    examples:
      qkflow report runs/speeches-tiny-200000
      qkflow report study --json

    Args:
        folder: folder that `qkflow compare` or `qkflow pace study` wrote.
        json: print the summary as one JSON object on stdout.
    """
    from qkflow.studies.pace.config import is_pace_study
    from qkflow.studies.runner.study_dir import StudyDir

    if is_pace_study(StudyDir(folder).load()):
        from qkflow.cli.commands.pace_study import report_study
        from qkflow.studies.pace import rebuild_pace_study

        return report_study(rebuild_pace_study(folder), json)
    from qkflow.cli.commands.compare import print_comparison
    from qkflow.report import write_outputs
    from qkflow.studies import load_comparison

    comparison = load_comparison(folder)
    write_outputs(comparison)
    return print_comparison(comparison, json)
