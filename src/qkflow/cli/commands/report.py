"""`qkflow report`: build a comparison's outputs anew from its folder."""

from __future__ import annotations

from pathlib import Path

import tyro


def report(folder: tyro.conf.Positional[Path], json: bool = False) -> int:
    """Write report.html, summary.json, summary.csv and curves.csv anew from the runs in a study's folder.

    Nothing is trained. It may be run while the comparison is still going, to see how things stand.

    examples:
      qkflow report runs/speeches-tiny-200000
      qkflow report study --json

    Args:
        folder: The folder `qkflow compare` or `qkflow pace study` wrote.
        json: Print the summary as JSON, and nothing else, on stdout.
    """
    from qkflow.studies.pace.config import is_pace_study
    from qkflow.studies.runner.study_dir import StudyDir

    if is_pace_study(StudyDir(folder).load()):
        from qkflow.cli.commands.pace_study import report_study
        from qkflow.studies.pace import rebuild_pace_study

        return report_study(rebuild_pace_study(folder), json)
    from qkflow.cli.commands.compare import print_comparison
    from qkflow.studies import rebuild_report

    return print_comparison(rebuild_report(folder), json)
