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
    from qkflow.pace.study.plan import is_pace_study
    from qkflow.studies.folder import StudyFolder

    if is_pace_study(StudyFolder(folder).load()):
        from qkflow.commands import pace_study
        from qkflow.pace.study import rebuild as rebuild_pace

        return pace_study.show(rebuild_pace(folder), json)
    from qkflow.commands.compare import show
    from qkflow.studies import rebuild

    return show(rebuild(folder), json)
