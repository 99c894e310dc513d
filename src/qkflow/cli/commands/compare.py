"""`qkflow compare`: does a variant beat standard attention on a corpus?"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qkflow import console, studies
from qkflow.cli.options import options_from
from qkflow.report import write_outputs
from qkflow.studies import Comparison, ComparisonConfig
from qkflow.studies.config import ExecutionConfig
from qkflow.studies.runner.execution import StudyInterrupted

EXIT_INTERRUPTED = 130  # 128 + SIGINT


@options_from(ComparisonConfig, ExecutionConfig, as_text=("tokens",))
def compare(settings: dict[str, Any], out: Path | None = None, json: bool = False) -> int:
    """Compare variants of attention with the standard model at its best init.

    Every variant is trained with every init and the same seeds. The verdict is on the paired difference of
    final validation losses, each side at its best init, with an interval. Without --tokens and --minutes, a
    run trains on 200k tokens. The same command resumes an interrupted comparison; seeds, variants and inits
    may be added later. With --finetune, every trained model is then fine-tuned on the tasks, and the
    differences of their scores get verdicts too; it may be added to a finished comparison.

    examples:
      qkflow compare
      qkflow compare --data my.txt --variants standard,euler,leapfrog:n=7 --seeds 5 --tokens 1M --out study
      qkflow compare --data speeches --minutes 10 --tune-lr
      qkflow compare --variants affine+differential,euler@fan_in --controls none --match time
      qkflow compare --finetune glue:SST-2,CoLA,MRPC,RTE --finetune-data glue

    Args:
        out: folder of the study (default: runs/DATA-PRESET-BUDGET).
        json: print the summary as one JSON object on stdout.
    """
    try:
        comparison = studies.compare(out=out, **settings)
    except StudyInterrupted:
        return print_interrupted()
    write_outputs(comparison)
    return print_comparison(comparison, json)


def print_interrupted() -> int:
    console.err.print("interrupted; all finished work is saved: run the same command to resume")
    return EXIT_INTERRUPTED


def print_comparison(comparison: Comparison, json: bool) -> int:
    """Print a comparison; return exit code 1 if a run has not finished."""
    from qkflow.report.finetune import terminal_tables
    from qkflow.report.tables import terminal_table

    summary = comparison.summary
    if json:
        console.emit_json({**summary.to_dict(), "folder": str(comparison.folder)})
    else:
        console.out.print(terminal_table(summary), *terminal_tables(summary.finetune))
        console.out.print()
        sentences = [*comparison.verdicts.values(), *(task.sentence for task in summary.finetune)]
        print_findings(summary.headline, sentences, summary.notes, comparison.folder)
    return 0 if comparison.is_complete else 1


def print_findings(headline: str, sentences: Iterable[str], notes: Iterable[str], folder: Path) -> None:
    """Print the text of a study: headline, verdicts, caveats and the path of the report."""
    out = console.out
    out.print(headline, markup=False, highlight=False, style="bold")
    for sentence in sentences:
        out.print(f"• {sentence}", markup=False, highlight=False)
    for note in notes:
        out.print(f"! {note}", markup=False, highlight=False, style="yellow")
    out.print(f"report: {folder / 'report.html'}", markup=False, highlight=False, soft_wrap=True)
