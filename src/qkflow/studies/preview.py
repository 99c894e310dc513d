"""What a comparison would run and how long it would take: `qkflow compare … --dry-run`. Writes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qkflow.data.corpus_size import CorpusSize, measure_corpus
from qkflow.studies.compare import plan_study, read_pilot_sd
from qkflow.studies.config import AUTO, ComparisonConfig, ExecutionConfig
from qkflow.studies.estimate import (
    RUN_OVERHEAD_SECONDS,
    STUDY_OVERHEAD_SECONDS,
    default_jobs,
    hours,
    matmul_flops_per_second,
    training_utilization,
)
from qkflow.studies.grid import EVAL_SHARE, Grid
from qkflow.studies.hardware.plan import model_cost
from qkflow.studies.plan import Role
from qkflow.studies.sentences import power_sentence
from qkflow.studies.tuning import MAX_WIDENINGS
from qkflow.studies.workload import (
    arm_workloads,
    count_runs,
    flops_by_model,
    study_power,
    token_scales,
    trained_models,
    unique_cells,
)


@dataclass(frozen=True)
class ArmPreview:
    """The runs of one arm. `tokens` are per run, the largest of its cells."""

    name: str
    role: Role
    cells: tuple[str, ...]
    tokens: int
    runs: int
    flops: float
    hours: float


@dataclass(frozen=True)
class StudyPreview:
    """The runs of a comparison. A cell of two arms is counted once in the totals."""

    folder: str
    corpus: CorpusSize
    arms: tuple[ArmPreview, ...]
    cells: int
    runs: int
    flops: float
    hours: float
    jobs: int
    matmul_flops_per_second: float  # measured, of the threads of one run
    utilization: float  # of training steps, relative to that matmul
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def preview(
    data: str = ComparisonConfig.data,
    *,
    out: str | Path | None = None,
    **settings: Any,
) -> StudyPreview:
    """Check a comparison as `compare` does, read its corpus, and estimate its cost."""
    execution, settings = ExecutionConfig.split(settings)
    config = ComparisonConfig.parse(data=data, **settings)
    threads = execution.threads * execution.processes_per_run
    grid, study_dir = plan_study(config, out)
    corpus = measure_corpus(config.data)
    jobs = execution.jobs or default_jobs(config.device, threads)
    speed = matmul_flops_per_second(config.device, threads)
    cost = _flops_by_model(grid)
    first = trained_models(grid)[0]
    utilization = training_utilization(first, cost[first.name], speed, threads, jobs)
    tokens = _tokens_by_model(grid, cost, utilization * speed, jobs)
    workloads = arm_workloads(grid, cost, tokens)
    arms = tuple(
        ArmPreview(
            arm.name,
            arm.role,
            tuple(cell.cell for cell in arm.cells),
            arm.tokens,
            arm.runs,
            arm.flops,
            hours(arm.flops, arm.runs, speed, jobs, utilization),
        )
        for arm in workloads
    )
    cells = unique_cells(workloads)
    runs, flops = sum(cell.runs for cell in cells), sum(cell.flops for cell in cells)
    notes = (*_notes(grid), *_power_note(grid, read_pilot_sd(config.pilot)))
    total = hours(flops, runs, speed, jobs, utilization) + STUDY_OVERHEAD_SECONDS / 3600
    folder = str(study_dir.path)
    return StudyPreview(folder, corpus, arms, len(cells), runs, flops, total, jobs, speed, utilization, notes)


def _flops_by_model(grid: Grid) -> dict[str, float]:
    """Return the FLOPs of a training token by model, with its share of the update of Muon."""
    flops = {}
    for model in trained_models(grid):
        train = model.train
        cost = model_cost(model.config, model.seq_len, train.optimizer, train.activation_checkpointing)
        flops[model.name] = cost.flops_per_token + cost.flops_per_update / (train.batch_size * model.seq_len)
    return flops


def _tokens_by_model(grid: Grid, cost: Mapping[str, float], speed: float, jobs: int) -> dict[str, int]:
    """Return the tokens of a run by model, at `speed` in FLOPs per second. Equal time means equal FLOPs."""
    config, scale = grid.config, token_scales(grid, flops_by_model(grid))
    base = config.tokens
    if base is None:
        seconds = 60 * (config.minutes or 0) * jobs - RUN_OVERHEAD_SECONDS * grid.n_runs
        per_token = sum(
            count_runs(grid, cell) * cost[cell.variant.model_name] * scale[cell.variant.model_name]
            for cell in grid.cells
        )
        base = int(max(0.0, seconds) * speed / (per_token * (1 + EVAL_SHARE)))
    return {model: round(base * each) for model, each in scale.items()}


def _power_note(grid: Grid, pilot_sd: float | None) -> list[str]:
    source = "not known yet" if pilot_sd is None else "the pilot study"
    power = study_power(grid, pilot_sd, source)
    return [] if power is None else [power_sentence(power)]


def _notes(grid: Grid) -> list[str]:
    config = grid.config
    first_look = min(config.seed_design().looks, default=config.n_seeds)
    screening = len(grid.screened_cells) * config.screening_seeds
    fewest = screening + (len(grid.arms) + config.verdict) * first_look
    notes = []
    if fewest < grid.n_runs:
        notes.append(
            f"These are the most runs there can be, at least {fewest}: inits that lose the screening are not "
            "judged" + (", and arms that are decided get no more seeds." if config.seeds == AUTO else ".")
        )
    if config.minutes is not None:
        notes.append(
            f"--minutes {config.minutes:g}: tokens per run are estimated, and measured before training."
        )
    if config.match == "time":
        notes.append("--match time: tokens per run are estimated from FLOPs; the study measures them first.")
    if config.tune_lr:
        notes.append(
            f"--tune-lr: the grid of learning rates is widened at most {MAX_WIDENINGS} times, which adds up "
            f"to {2 * MAX_WIDENINGS} runs per cell."
        )
        fixed = dict.fromkeys(cell.variant.name for cell in grid.cells if cell.fixed_lr is not None)
        if fixed:
            notes.append(f"Not tuned, since train.lr is set: {', '.join(fixed)}.")
    if len({cell.tokenizer(config) for cell in grid.cells}) > 1:
        notes.append("Tokenizers differ: bits per byte are judged, not losses per token.")
    return notes
