"""`qkflow compare`: does a variant beat standard attention on this corpus?"""

from __future__ import annotations

from pathlib import Path

from qkflow import console, studies
from qkflow.studies import Comparison, ComparisonConfig
from qkflow.studies.runner.execution import StudyInterrupted


def compare(
    data: str = ComparisonConfig.data,
    variants: tuple[str, ...] = ComparisonConfig.variants,
    controls: tuple[str, ...] = ComparisonConfig.controls,
    inits: tuple[str, ...] = ComparisonConfig.inits,
    seeds: int = ComparisonConfig.seeds,
    preset: str = ComparisonConfig.preset,
    tokens: str | None = None,
    minutes: float | None = None,
    out: Path | None = None,
    tokenizer: str = ComparisonConfig.tokenizer,
    seq_len: int = ComparisonConfig.seq_len,
    batch_size: int = ComparisonConfig.batch_size,
    lr: float = ComparisonConfig.lr,
    schedule: str = ComparisonConfig.schedule,
    tune_lr: bool = ComparisonConfig.tune_lr,
    lr_factors: tuple[str, ...] = ("0.5", "1", "2"),
    match: str = ComparisonConfig.match,
    verdict: bool = ComparisonConfig.verdict,
    confidence: float = ComparisonConfig.confidence,
    device: str = ComparisonConfig.device,
    engine: str = "local",
    jobs: int | None = None,
    threads: int = 1,
    json: bool = False,
) -> int:
    """Compare variants of attention with the best-started standard model on a corpus.

    Every variant is trained from every start with the same seeds; what is judged is the paired difference
    of final validation losses, each side at its best start, with an interval and a verdict in words.
    The same command goes on where an interrupted one stopped; more seeds or variants may be added later.

    examples:
      qkflow compare
      qkflow compare --data my.txt --variants standard,euler,leapfrog:n=7 --seeds 5 --tokens 1M --out study
      qkflow compare --data speeches --minutes 10 --tune-lr
      qkflow compare --variants affine+differential,euler@fan_in --controls none --match time

    Args:
        data: The corpus: a built-in name, a path, or hf:NAME.
        variants: What to compare, e.g. standard,euler,leapfrog:n=7,affine+differential,euler@fan_in.
        controls: What stands beside the variants to explain a gain; `none` for nothing.
        starts: The starts every variant and the standard model run from, e.g. gpt2,fan_in,mimetic.
        seeds: How many paired seeds; a verdict needs at least 3.
        preset: The size of the model: tiny, small, 60m, 150m, 350m or 455m.
        tokens: Training tokens of a run, e.g. 200k or 1M (200k unless --minutes is given).
        minutes: Instead of --tokens: about how long the whole comparison may take.
        out: The study's folder (default: runs/DATA-PRESET-BUDGET).
        tokenizer: How text becomes tokens: bytes, bpe:SIZE, a path or hf:NAME.
        length: Tokens in a window.
        batch: Windows in a step.
        lr: The learning rate (with --tune-lr the middle of the grid).
        schedule: How the learning rate goes over a run: cosine, wsd or constant.
        tune_lr: Give every variant from every start the same small learning-rate search.
        lr_factors: The grid of that search, as factors of --lr.
        match: What runs have in common: tokens, time or flops.
        verdict: Give numbers without verdicts, which allows fewer than 3 seeds.
        confidence: The level of intervals and verdicts.
        device: auto, cpu, cuda or mps.
        engine: local processes, or ray.
        jobs: Runs at a time (default: one per core, or per GPU).
        threads: Threads of a run.
        json: Print the summary as JSON, and nothing else, on stdout.
    """
    asked = {name: value for name, value in locals().items() if name in ComparisonConfig.__dataclass_fields__}
    try:
        answer = studies.compare(out=out, engine=engine, jobs=jobs, threads=threads, **asked)
    except StudyInterrupted:
        console.err.print("stopped; everything done so far is kept: the same command goes on from there")
        return 130
    return print_comparison(answer, json)


def print_comparison(comparison: Comparison, json: bool) -> int:
    """Print a comparison; the exit code says whether every run finished."""
    from qkflow.report.tables import terminal_table

    if json:
        console.emit_json({**comparison.summary, "folder": str(comparison.folder)})
    else:
        out = console.out
        out.print(terminal_table(comparison.summary))
        out.print()
        out.print(comparison.summary["headline"], markup=False, highlight=False, style="bold")
        for sentence in comparison.verdicts.values():
            out.print(f"• {sentence}", markup=False, highlight=False)
        for note in comparison.summary["notes"]:
            out.print(f"! {note}", markup=False, highlight=False, style="yellow")
        out.print(
            f"report: {comparison.folder / 'report.html'}", markup=False, highlight=False, soft_wrap=True
        )
    return 0 if comparison.complete else 1
