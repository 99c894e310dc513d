"""`qkflow report`: rebuild the outputs of a study from its folder."""

from __future__ import annotations

from pathlib import Path

import tyro

from qkflow.errors import InputError
from qkflow.report.study_tables import TableName
from qkflow.studies import Comparison


def report(
    folder: tyro.conf.Positional[Path],
    record: Path | None = None,
    table: TableName | None = None,
    markdown: bool = False,
    json: bool = False,
) -> int:
    """Rebuild report.html, summary.json, summary.csv and curves.csv from the runs in a study's folder.

    Nothing is trained. The study may still be running; the report then covers its finished runs. A record is
    a comparison as one small JSON file, without weights and logs. It is judged as its folder is.

    examples:
      qkflow report runs/speeches-tiny-200000
      qkflow report study --json
      qkflow report study --record study.json
      qkflow report study.json --table cells --markdown

    Args:
        folder: folder that `qkflow compare` or `qkflow pace study` wrote, or the record of a comparison.
        record: write the comparison as a record to this JSON file.
        table: print one table and write nothing. verdicts: the judged arms; cells: every model and init with
            its seeds; rates: the search of learning rates; gaps: differences during training; dynamics:
            stability, induction heads, symmetry.
        markdown: print the table (default: verdicts) as Markdown.
        json: print the summary as one JSON object on stdout.
    """
    from qkflow.studies.pace.config import is_pace_study
    from qkflow.studies.runner.study_dir import StudyDir

    if folder.is_dir() and is_pace_study(StudyDir(folder).load()):
        from qkflow.cli.commands.pace_study import report_study
        from qkflow.studies.pace import rebuild_pace_study

        if record or table or markdown:
            raise InputError(
                f"{folder} is a pace study: --record, --table and --markdown are for comparisons",
                code="not-a-comparison",
            )
        return report_study(rebuild_pace_study(folder), json)
    from qkflow.cli.commands.compare import print_comparison
    from qkflow.report import write_outputs
    from qkflow.studies import load_comparison, save_record

    comparison = load_comparison(folder)
    if record:
        save_record(folder, record)
    if table or markdown:
        return _print_table(table or "verdicts", comparison, markdown)
    if folder.is_dir():
        write_outputs(comparison)
    return print_comparison(comparison, json)


def _print_table(name: TableName, comparison: Comparison, markdown: bool) -> int:
    from qkflow.cli.commands.registry import print_rows
    from qkflow.report.study_tables import TABLES

    rows = TABLES[name](comparison)
    if not rows:
        raise InputError(
            f"{comparison.folder} has no finished runs to show in the table {name}", code="no-finished-runs"
        )
    print_rows(name, rows, json=False, markdown=markdown)
    return 0
