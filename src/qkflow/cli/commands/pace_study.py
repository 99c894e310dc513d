"""`qkflow pace study`: compare query-key learning rates on a labelled task."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from qkflow import console
from qkflow.studies.pace.config import PaceStudyConfig

if TYPE_CHECKING:
    from qkflow.studies.pace import PaceStudyResult


def study(
    config: PaceStudyConfig, out: Path | None = None, jobs: int | None = None, json: bool = False
) -> int:
    """Train small models whose query-key circuit learns r times as fast, and measure their attention.

    Only the learning rate of the query and key projections differs between runs, unless --as-published adds
    the authors' other changes. Every ratio runs with the same seeds. Verdicts are on the paired difference to
    r = 1 in test performance, attention on the human rationale, attention confidence, comprehensiveness and
    sufficiency. The same command resumes an interrupted study; seeds and ratios can be added later.

    $ qkflow pace study agreement
    $ qkflow pace study agreement --ratios 1,10,increasing:40 --epochs 3 --out agreement
    $ qkflow pace study hatexplain --data data/hatexplain --as-published
    $ qkflow pace study squad --data data/squad --examples 5000 --seeds 5
    $ qkflow pace study sst-2 --data hf --ratios 1,10

    Args:
        out: folder of the study (default: runs/pace-TASK…).
        jobs: parallel runs, one thread each (default: one per CPU core).
        json: print the summary as JSON, and nothing else, on stdout.
    """
    from qkflow.studies.pace import run_pace_study
    from qkflow.studies.runner.execution import StudyInterrupted

    if config.ratios is not None:
        ratios = [ratio.strip() for text in config.ratios for ratio in text.split(",")]
        config = replace(config, ratios=tuple(filter(None, ratios)))
    try:
        result = run_pace_study(config, out, jobs)
    except StudyInterrupted:
        console.err.print("interrupted; finished runs are kept, the same command resumes the study")
        return 130
    return report_study(result, json)


def report_study(result: PaceStudyResult, json: bool) -> int:
    """Write the report and print the results. Return exit code 0 if every run finished, else 1."""
    from qkflow.report.pace import write_report
    from qkflow.report.pace_tables import attribution_table, results_table

    write_report(result)
    summary = result.summary
    if json:
        console.emit_json({**summary.to_dict(), "folder": str(result.folder)})
    else:
        out = console.out
        out.print(results_table(summary))
        out.print(attribution_table(summary))
        out.print(summary.headline, markup=False, highlight=False, style="bold")
        for row in summary.rows:
            for sentence in row.sentences:
                out.print(f"• {sentence}", markup=False, highlight=False)
        for note in summary.notes:
            out.print(f"! {note}", markup=False, highlight=False, style="yellow")
        out.print(f"report: {result.folder / 'report.html'}", markup=False, highlight=False, soft_wrap=True)
    return 0 if result.complete else 1
