"""`qkflow reproduce`: the papers' own questions, asked on your text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import tyro

from qkflow import console
from qkflow.cli.commands.compare import print_comparison
from qkflow.papers.published import Stage, get_paper_study
from qkflow.papers.published import reproduce as run_published
from qkflow.studies import Comparison, ComparisonConfig
from qkflow.studies.runner.execution import StudyInterrupted


def reproduce(
    study: Annotated[str, tyro.conf.Positional],
    data: str = ComparisonConfig.data,
    tokens: str | None = None,
    seeds: int | None = None,
    stages: tuple[str, ...] = (),
    preset: str = ComparisonConfig.preset,
    out: Path | None = None,
    tokenizer: str = ComparisonConfig.tokenizer,
    seq_len: int = ComparisonConfig.seq_len,
    batch_size: int = ComparisonConfig.batch_size,
    lr: float = ComparisonConfig.lr,
    device: str = ComparisonConfig.device,
    engine: str = "local",
    jobs: int | None = None,
    threads: int = 1,
    json: bool = False,
) -> int:
    """Ask a paper's own question: every comparison it takes, one after the other, with its verdicts.

    fast-slow: does the gate of the slow path open, what does that pay, is it the cold start that keeps it
    closed? 500k tokens, 5 seeds, all ablations (stage `short`); ten times the tokens, closed and open start
    (stage `long`). coupling: does coupling pay beside free starts? 1M tokens, 3 seeds, from both starts.
    The same command goes on where an interrupted one stopped.

    $ qkflow reproduce fast-slow
    $ qkflow reproduce fast-slow --stages short --data my.txt --out runs/mine
    $ qkflow reproduce coupling --data wikitext-2

    Args:
        study: fast-slow or coupling.
        data: The corpus: a built-in name, a path, or hf:NAME.
        tokens: Training tokens of a run, those of the first stage (default: the study's own).
        seeds: How many paired seeds (default: the study's own).
        stages: Only these parts of the study, e.g. short (default: all).
        preset: The size of the model.
        out: The study's folder (default: runs/STUDY).
        tokenizer: How text becomes tokens.
        length: Tokens in a window.
        batch: Windows in a step.
        lr: The learning rate.
        device: auto, cpu, cuda or mps.
        engine: local processes, or ray.
        jobs: Runs at a time (default: one per core, or per GPU).
        threads: Threads of a run.
        json: Print everything found as JSON, and nothing else, on stdout.
    """
    given = {
        "data": data,
        "preset": preset,
        "tokenizer": tokenizer,
        "seq_len": seq_len,
        "batch_size": batch_size,
    }
    given |= {"lr": lr, "device": device}
    given |= {name: value for name, value in (("tokens", tokens), ("seeds", seeds)) if value is not None}
    codes = []

    def shown(stage: Stage, comparison: Comparison, found: dict[str, Any]) -> None:
        codes.append(0 if comparison.complete else 1)
        if not json:
            console.out.rule(f"{study}, {stage.name}")
            print_comparison(comparison, json=False)
            for sentence in found.get("sentences", []):
                console.out.print(f"• {sentence}", markup=False, highlight=False)

    paper = get_paper_study(study)
    console.err.print(f"{paper.paper}: {paper.claim}", markup=False, highlight=False)
    execution = {"engine": engine, "jobs": jobs, "threads": threads}
    wanted = tuple(name for text in stages for name in text.split(",") if name)
    try:
        answer = run_published(
            study,
            out or Path("runs") / study,
            stages=wanted,
            on_stage_end=shown,
            execution_kwargs=execution,
            **given,
        )
    except StudyInterrupted:
        console.err.print("stopped; everything done so far is kept: the same command goes on from there")
        return 130
    if json:
        console.emit_json(answer)
    return max(codes, default=0)
