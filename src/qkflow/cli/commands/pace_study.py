"""`qkflow pace study`: compare query-key learning rates on a labeled task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qkflow import console
from qkflow.cli.commands.compare import print_findings, print_interrupted
from qkflow.cli.options import options_from
from qkflow.studies.config import split_list
from qkflow.studies.pace import PaceStudyConfig, PaceStudyResult, run_pace_study
from qkflow.studies.runner.execution import StudyInterrupted


@options_from(PaceStudyConfig)
def study(
    settings: dict[str, Any], out: Path | None = None, jobs: int | None = None, json: bool = False
) -> int:
    """Train small models whose query-key circuit learns r times as fast, and measure their attention.

    Only the learning rate of the query and key projections differs between runs, unless --as-published adds
    the authors' other changes. Every ratio runs with the same seeds. Verdicts are on the paired difference to
    r = 1 in test performance, attention on the human rationale, attention confidence, comprehensiveness and
    sufficiency. Options without a default follow the recipe of the task. The same command resumes an
    interrupted study; seeds and ratios can be added later.

    examples:
      qkflow pace study agreement
      qkflow pace study agreement --ratios 1,10,increasing:40 --epochs 3 --out agreement
      qkflow pace study hatexplain --data data/hatexplain --as-published
      qkflow pace study squad --data data/squad --examples 5000 --seeds 5
      qkflow pace study sst-2 --data hf --ratios 1,10

    Args:
        out: folder of the study (default: runs/pace-TASK…).
        jobs: parallel runs, one thread each (default: one per CPU core).
        json: print the summary as one JSON object on stdout.
    """
    ratios = settings.pop("ratios")
    config = PaceStudyConfig(**settings, ratios=None if ratios is None else split_list(ratios))
    try:
        result = run_pace_study(config, out, jobs)
    except StudyInterrupted:
        return print_interrupted()
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
        console.out.print(results_table(summary))
        console.out.print(attribution_table(summary))
        sentences = [sentence for row in summary.rows for sentence in row.sentences]
        print_findings(summary.headline, sentences, summary.notes, result.folder / "report.html")
    return 0 if result.is_complete else 1
