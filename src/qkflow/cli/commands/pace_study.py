"""`qkflow pace study`: baseline against a faster query-key circuit on a labelled task."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from qkflow import console


def study(
    task: Annotated[str, tyro.conf.Positional],
    *,
    data: str | None = None,
    as_published: bool = False,
    seeds: int = 3,
    ratios: str | None = None,
    lr: float | None = None,
    optimizer: str | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    n_layers: int | None = None,
    dim: int | None = None,
    n_heads: int | None = None,
    examples: int | None = None,
    window: int = 200,
    test: int = 1000,
    measured: int | None = None,
    confidence: float = 0.95,
    out: Path | None = None,
    jobs: int | None = None,
    json: bool = False,
) -> int:
    """Train small models whose query-key circuit learns r times as fast, and measure what attention does.

    Only the rate of the query and key projections differs between runs, unless --as-published adds what the
    authors changed along with it. Every ratio runs with the same seeds; what is judged is the paired
    difference to r = 1: test performance, attention on the human rationale, attention confidence, and what
    deleting the top tokens does (comprehensiveness, sufficiency), next to gradient and random rankings. The
    same command goes on where an interrupted one stopped; more seeds or ratios may be added later.

    $ qkflow pace study agreement
    $ qkflow pace study agreement --ratios 1,10,increasing:40 --epochs 3 --out agreement
    $ qkflow pace study hatexplain --data data/hatexplain --as-published
    $ qkflow pace study squad --data data/squad --examples 5000 --seeds 5
    $ qkflow pace study sst-2 --data hf --ratios 1,10

    Args:
        task: agreement, hatexplain, squad, sst-2, cola, mrpc or rte.
        data: file, folder or hf; agreement makes its own sentences if none is given.
        as_published: the authors' optimizer, rates, confounds and measuring rules.
        seeds: how many paired seeds; a verdict needs at least 3.
        ratios: query-key rates over all others, e.g. 1,3,10 or increasing:40; 1 is the baseline.
        lr: the learning rate of everything else.
        optimizer: adamw or sgd (momentum .99).
        steps: training steps (default: --epochs).
        epochs: passes over the training texts.
        batch: texts a step.
        layers: of the model (default: of the task's recipe).
        width: of the model; the feed-forward is four times as wide.
        heads: of the model.
        examples: most training texts.
        window: of SQuAD, the characters of context kept either side of an answer.
        test: most test texts.
        measured: most test texts whose attention is measured.
        confidence: the level of intervals and verdicts.
        out: the study's folder (default: runs/pace-TASK…).
        jobs: runs at a time, one thread each (default: one per core).
        json: print the summary as JSON, and nothing else, on stdout.
    """
    from qkflow.studies.pace import PaceStudyConfig, run_pace_study
    from qkflow.studies.runner.execution import StudyInterrupted

    chosen = tuple(part.strip() for part in ratios.split(",") if part.strip()) if ratios else None
    settings = PaceStudyConfig(
        task, data, as_published, seeds, chosen, lr, optimizer, steps, epochs, batch_size, n_layers, dim, n_heads,
        examples, window, test, measured, confidence,
    )  # fmt: skip
    try:
        answer = run_pace_study(settings, out, jobs)
    except StudyInterrupted:
        console.err.print("stopped; every finished run is kept: the same command goes on from there")
        return 130
    return print_study(answer, json)


def print_study(result: object, json: bool) -> int:
    """Print a study; the exit code says whether every run finished."""
    from qkflow.report.pace_tables import attribution_table, results_table
    from qkflow.studies.pace import PaceStudyResult

    assert isinstance(result, PaceStudyResult)
    summary = result.summary
    if json:
        console.emit_json({**summary, "folder": str(result.folder)})
    else:
        out = console.out
        out.print(results_table(summary))
        out.print(attribution_table(summary))
        out.print(summary["headline"], markup=False, highlight=False, style="bold")
        for row in summary["rows"]:
            for sentence in row["sentences"]:
                out.print(f"• {sentence}", markup=False, highlight=False)
        for note in summary["notes"]:
            out.print(f"! {note}", markup=False, highlight=False, style="yellow")
        out.print(f"report: {result.folder / 'report.html'}", markup=False, highlight=False, soft_wrap=True)
    return 0 if result.complete else 1
