"""`qkflow report`: rebuild the outputs of a study from its folder, or show several studies on one page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from qkflow import console
from qkflow.errors import InputError
from qkflow.report.study_tables import TableName

if TYPE_CHECKING:
    from qkflow.studies import Comparison

STUDIES_PAGE = Path("studies.html")


def report(
    studies: tyro.conf.Positional[tuple[Path, ...]],
    out: Path | None = None,
    record: Path | None = None,
    table: TableName | None = None,
    markdown: bool = False,
    json: bool = False,
) -> int:
    """Rebuild report.html, summary.json, summary.csv and curves.csv from the runs in a study's folder.

    Nothing is trained. The study may still be running; the report then covers its finished runs. A record is
    a comparison as one small JSON file, without weights and logs. It is judged as its folder is. Several
    comparisons are shown side by side on one page, each with its own verdicts.

    examples:
      qkflow report runs/speeches-tiny-200000
      qkflow report study --json
      qkflow report study --record study.json
      qkflow report study.json --out study.html
      qkflow report study.json --table cells --markdown
      qkflow report small large --out sizes.html

    Args:
        studies: folder that `qkflow compare` or `qkflow pace study` wrote, or the record of a comparison;
            several comparisons for one page of all.
        out: write the page to this HTML file, and nothing else (default: report.html in the study's folder
            with the other outputs; of several studies: studies.html; of a record: no page).
        record: write the comparison as a record to this JSON file.
        table: print one table and write nothing. verdicts: the judged arms; cells: every model and init with
            its seeds; rates: the search of learning rates; gaps: differences during training; dynamics:
            stability, induction heads, symmetry.
        markdown: print the table (default: verdicts) as Markdown.
        json: print the summary as one JSON object on stdout.
    """
    if not studies:
        raise InputError("name the folder or the record of a study", code="missing-study")
    if out is not None and out.is_dir():
        raise InputError(f"--out {out} is a folder: pass the path of an HTML file", code="out-is-a-folder")
    if any(_is_pace_study(path) for path in studies):
        if len(studies) > 1 or out or record or table or markdown:
            raise InputError(
                f"{next(filter(_is_pace_study, studies))} is a pace study: several studies, --out, --record, "
                "--table and --markdown are for comparisons",
                code="not-a-comparison",
            )
        from qkflow.cli.commands.pace_study import report_study
        from qkflow.studies.pace import rebuild_pace_study

        return report_study(rebuild_pace_study(studies[0]), json)
    if len(studies) > 1:
        if record or table or markdown:
            raise InputError(
                "--record, --table and --markdown are for one study: name one", code="several-studies"
            )
        return _report_several(studies, out or STUDIES_PAGE, json)
    return _report_one(studies[0], out, record, table or ("verdicts" if markdown else None), markdown, json)


def _is_pace_study(path: Path) -> bool:
    from qkflow.studies.pace.config import is_pace_study
    from qkflow.studies.runner.study_dir import StudyDir

    return path.is_dir() and is_pace_study(StudyDir(path).load())


def _report_one(
    folder: Path, out: Path | None, record: Path | None, table: TableName | None, markdown: bool, json: bool
) -> int:
    from qkflow.cli.commands.compare import print_comparison
    from qkflow.files import write_atomic
    from qkflow.report import write_outputs
    from qkflow.report.page import render_report
    from qkflow.studies import load_comparison, save_record

    comparison = load_comparison(folder)
    if record:
        save_record(folder, record)
    if table:
        return _print_table(table, comparison, markdown, json)
    if out:
        write_atomic(out, render_report(comparison))
    elif folder.is_dir():
        write_outputs(comparison)
    return print_comparison(comparison, json, out)


def _report_several(folders: tuple[Path, ...], out: Path, json: bool) -> int:
    from qkflow.files import write_atomic
    from qkflow.report.joint import render_studies, study_names
    from qkflow.report.tables import terminal_table
    from qkflow.studies import load_comparison

    comparisons = [load_comparison(folder) for folder in folders]
    write_atomic(out, render_studies(comparisons))
    names = study_names(comparisons)
    if json:
        summaries = zip(names, comparisons, strict=True)
        console.emit_json(
            {
                "studies": {
                    name: {**each.summary.to_dict(), "folder": str(each.folder)} for name, each in summaries
                },
                "page": str(out),
            }
        )
    else:
        for name, comparison in zip(names, comparisons, strict=True):
            console.out.print(name, style="bold", markup=False, highlight=False)
            console.out.print(terminal_table(comparison.summary, console.out.width))
        console.out.print(f"report: {out}", markup=False, highlight=False, soft_wrap=True)
    return 0 if all(comparison.is_complete for comparison in comparisons) else 1


def _print_table(name: TableName, comparison: Comparison, markdown: bool, json: bool) -> int:
    from qkflow.cli.commands.registry import print_rows
    from qkflow.report.study_tables import TABLES

    rows = TABLES[name](comparison)
    if not rows:
        raise InputError(
            f"{comparison.folder} has no finished runs to show in the table {name}", code="no-finished-runs"
        )
    print_rows(name, rows, json=json, markdown=markdown)
    return 0
