"""`qkflow compare`: does a variant beat the best baseline on a corpus?"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from qkflow import console, studies
from qkflow.cli.options import options_from
from qkflow.errors import InputError
from qkflow.report import write_outputs
from qkflow.studies import Comparison, ComparisonConfig
from qkflow.studies.config import ExecutionConfig
from qkflow.studies.preview import StudyPreview, preview
from qkflow.studies.runner.execution import StudyInterrupted

EXIT_INTERRUPTED = 130  # 128 + SIGINT


@options_from(ComparisonConfig, ExecutionConfig, as_text=("tokens", "tune_tokens"))
def compare(
    settings: dict[str, Any],
    out: Path | None = None,
    reuse: Path | None = None,
    dry_run: bool = False,
    live: bool = False,
    json: bool = False,
) -> int:
    """Compare variants of attention with the best baseline at its best init.

    Every variant and baseline is trained with every init and the same seeds. The verdict is on the paired
    difference of final validation losses to the reference, the best baseline; each side has its best init.
    Without --tokens and --minutes, a run trains on 200k tokens. The same command resumes an interrupted
    comparison; variants, baselines and inits may be added later.

    With --finetune, every trained model is then fine-tuned on the tasks, and the differences of their scores
    get verdicts too; it may be added to a finished comparison.

    A variant is COMPONENTS{OVERRIDES}@INIT, e.g. "leapfrog:n=7+differential{train.lr=1e-3}@fan_in". Overrides
    are options of its components (euler{step=0.1} is euler:step=0.1) and keys of `qkflow config`:
    attention.KEY, model.KEY, slow.KEY, train.KEY, data.tokenizer and data.seq_len. Several values are a
    sweep, and sweeps multiply: euler{step=0,0.1,1} is three variants. Quote braces: the shell expands them.

    examples:
      qkflow compare
      qkflow compare --data my.txt --variants standard,euler,leapfrog:n=7 --seeds 5 --tokens 1M --out study
      qkflow compare --data speeches --minutes 10 --tune-lr
      qkflow compare --variants affine+differential,euler@fan_in --controls none --match time
      qkflow compare --variants "euler{step=0,0.1,1},symmetric:c=-1" --dry-run
      qkflow compare --baselines "standard{attention.qk_norm=false,true}" --variants affine
      qkflow compare --variants "standard{train.schedule=cosine,wsd, train.lr=1e-3,3e-3}" --controls none
      qkflow compare --finetune glue:SST-2,CoLA,MRPC,RTE --finetune-data glue

    Args:
        out: folder of the study (default: runs/DATA-PRESET-BUDGET).
        reuse: record of a comparison (`qkflow report --record`), e.g. of another machine. Its finished runs
            are written to --out and not repeated; variants may be added.
        dry_run: read the corpus, print its size, arms, runs, FLOPs and estimated hours, and exit; nothing is
            written.
        live: open a page that shows the runs, the time left and the verdicts while the study runs, as
            `qkflow watch` does. It ends with the study.
        json: print the summary as one JSON object on stdout.
    """
    if dry_run:
        return print_preview(preview(out=out, **settings), json)
    if reuse is not None:
        if out is None:
            raise InputError(
                "--reuse needs --out, the folder that its runs are written to", code="reuse-needs-out"
            )
        studies.restore_record(reuse, out)
    try:
        with _live_report(out, settings) if live else nullcontext():
            comparison = studies.compare(out=out, **settings)
            write_outputs(comparison)
    except StudyInterrupted:
        return print_interrupted()
    exit_code = print_comparison(comparison, json)
    if comparison.execution_time is not None and comparison.execution_time.jobs:
        console.err.print(str(comparison.execution_time), markup=False, highlight=False)
    return exit_code


def _live_report(out: Path | None, settings: dict[str, Any]) -> AbstractContextManager[Any]:
    """Return the server of the study's folder. Bad settings raise InputError before it starts."""
    from qkflow.report.live_server import live_server

    config = {k: v for k, v in settings.items() if k not in ExecutionConfig.__dataclass_fields__}
    return live_server(out or ComparisonConfig.parse(**config).default_folder())


def print_preview(planned: StudyPreview, json: bool) -> int:
    """Print what a comparison would run."""
    if json:
        console.emit_json(planned.to_dict())
        return 0
    table = Table(box=None, pad_edge=False)
    table.add_column("arm", overflow="fold")
    for column in ("role", "cells", "runs", "tokens per run", "FLOPs", "hours"):
        table.add_column(column, no_wrap=True, justify="left" if column == "role" else "right")
    for arm in planned.arms:
        cost = f"{arm.flops:.2g}", f"{arm.hours:.2f}"
        table.add_row(Text(arm.name), arm.role, str(len(arm.cells)), str(arm.runs), f"{arm.tokens:,}", *cost)
    total = f"{planned.flops:.2g}", f"{planned.hours:.2f}"
    table.add_row("total", "", str(planned.cells), str(planned.runs), "", *total, style="bold")
    console.out.print(table)
    console.out.print(f"corpus: {planned.corpus}", markup=False, highlight=False)
    speed = f"{planned.matmul_flops_per_second / 1e9:.0f} GFLOP/s"
    basis = f"training steps at {planned.utilization:.0%} of the measured {speed} of a matmul"
    console.out.print(f"hours: {planned.jobs} runs at a time, {basis}", markup=False, highlight=False)
    for note in planned.notes:
        console.out.print(f"! {note}", markup=False, highlight=False, style="yellow")
    return 0


def print_interrupted() -> int:
    console.err.print("interrupted; all finished work is saved: run the same command to resume")
    return EXIT_INTERRUPTED


def print_comparison(comparison: Comparison, json: bool, page: Path | None = None) -> int:
    """Print a comparison and the path of its page; return exit code 1 if a run has not finished."""
    from qkflow.report.finetune import terminal_tables
    from qkflow.report.tables import terminal_table

    summary = comparison.summary
    if json:
        console.emit_json({**summary.to_dict(), "folder": str(comparison.folder)})
    else:
        table = terminal_table(summary, console.out.width)
        console.out.print(table, *terminal_tables(summary.finetune))
        console.out.print()
        sentences = [*comparison.verdicts.values(), *(task.sentence for task in summary.finetune)]
        if page is None and comparison.folder.is_dir():  # a record has no page
            page = comparison.folder / "report.html"
        print_findings(summary.headline, sentences, summary.notes, page)
    return 0 if comparison.is_complete else 1


def print_findings(headline: str, sentences: Iterable[str], notes: Iterable[str], page: Path | None) -> None:
    """Print the text of a study: headline, verdicts, caveats and the path of the report, if it has one."""
    out = console.out
    out.print(headline, markup=False, highlight=False, style="bold")
    for sentence in sentences:
        out.print(f"• {sentence}", markup=False, highlight=False)
    for note in notes:
        out.print(f"! {note}", markup=False, highlight=False, style="yellow")
    if page is not None:
        out.print(f"report: {page}", markup=False, highlight=False, soft_wrap=True)
