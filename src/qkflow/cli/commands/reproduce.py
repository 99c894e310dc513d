"""`qkflow reproduce`: the comparisons of a paper on any corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import tyro

from qkflow import console
from qkflow.cli.commands.compare import print_comparison, print_interrupted
from qkflow.cli.options import options_from
from qkflow.papers.reproduce import Stage, get_paper_study
from qkflow.papers.reproduce import reproduce as reproduce_paper
from qkflow.studies import Comparison, ComparisonConfig
from qkflow.studies.config import ExecutionConfig
from qkflow.studies.runner.execution import StudyInterrupted

_CONFIG_OPTIONS = ("data", "tokens", "seeds", "preset", "tokenizer", "seq_len", "batch_size", "lr", "device")
_EXECUTION_OPTIONS = ("engine", "jobs", "threads")


@options_from(
    ComparisonConfig,
    ExecutionConfig,
    as_text=("tokens",),
    only=(*_CONFIG_OPTIONS, *_EXECUTION_OPTIONS),
    unset=("tokens", "seeds"),
)
def reproduce(
    settings: dict[str, Any],
    study: Annotated[str, tyro.conf.Positional],
    stages: tuple[str, ...] = (),
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Run the comparisons of a paper, one after the other.

    `fast-slow`: does the gate of the slow path open, what does that gain, and is it the gate init of zero
    that keeps it closed? Stage `short`: 500k tokens, 5 seeds, all ablations. Stage `long`: ten times the
    tokens, with the gate closed and open at init.

    `coupling`: does a coupling gain more than a free init? 1M tokens, 3 seeds, both inits.

    --tokens (of the first stage) and --seeds default to these. The same command resumes an interrupted study.

    examples:
      qkflow reproduce fast-slow
      qkflow reproduce fast-slow --stages short --data my.txt --out runs/mine
      qkflow reproduce coupling --data wikitext-2

    Args:
        study: fast-slow or coupling.
        stages: stages to run of the study, e.g. short (default: all).
        out: folder of the study (default: runs/STUDY).
        json: print all findings as one JSON object on stdout.
    """
    paper = get_paper_study(study)
    exit_codes: list[int] = []

    def print_stage(stage: Stage, comparison: Comparison, findings: dict[str, Any]) -> None:
        exit_codes.append(0 if comparison.is_complete else 1)
        if not json:
            if len(exit_codes) == 1:
                console.out.print(f"{paper.paper}: {paper.claim}", markup=False, highlight=False)
            console.out.rule(f"{study}, {stage.name}")
            print_comparison(comparison, json=False)
            for sentence in findings.get("sentences", []):
                console.out.print(f"• {sentence}", markup=False, highlight=False)

    execution = {name: settings.pop(name) for name in _EXECUTION_OPTIONS}
    try:
        findings = reproduce_paper(
            study,
            out or Path("runs") / study,
            stages=tuple(name for text in stages for name in text.split(",") if name),
            on_stage_end=print_stage,
            execution_kwargs=execution,
            **settings,
        )
    except StudyInterrupted:
        return print_interrupted()
    if json:
        console.emit_json(findings)
    return max(exit_codes)
