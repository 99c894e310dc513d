"""What a comparison would run and how long it would take: `qkflow compare … --dry-run`. Writes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from qkflow.data.corpus_size import CorpusSize, measure_corpus
from qkflow.models.cost import flops_per_token
from qkflow.studies.compare import plan_study, read_pilot_sd
from qkflow.studies.config import AUTO, ComparisonConfig, EngineName, ExecutionConfig
from qkflow.studies.estimate import (
    RUN_OVERHEAD_SECONDS,
    UTILIZATION,
    default_jobs,
    hours,
    matmul_flops_per_second,
    vocab_size,
)
from qkflow.studies.grid import EVAL_SHARE, Arm, Cell, Grid, build_run_config
from qkflow.studies.plan import Role
from qkflow.studies.power import detectable_effect
from qkflow.studies.results import Power
from qkflow.studies.sentences import power_sentence
from qkflow.studies.tuning import MAX_WIDENINGS
from qkflow.training.config import RunConfig


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
    utilization: float
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def preview(
    data: str = ComparisonConfig.data,
    *,
    out: str | Path | None = None,
    engine: EngineName = "local",
    jobs: int | None = None,
    threads: int = 1,
    **settings: Any,
) -> StudyPreview:
    """Check a comparison as `compare` does, read its corpus, and estimate its cost."""
    config = ComparisonConfig.parse(data=data, **settings)
    ExecutionConfig(engine, jobs, threads).check()
    grid, study_dir = plan_study(config, out)
    corpus = measure_corpus(config.data)
    jobs = jobs or default_jobs(config.device, threads)
    speed = matmul_flops_per_second(config.device, threads)
    cost = _flops_per_token(grid)
    tokens = _tokens_by_model(grid, cost, speed, jobs)

    def summarize(cells: Sequence[Cell]) -> tuple[int, float, float]:
        """Return the number of runs of cells, their FLOPs and their hours."""
        runs, flops = 0, 0.0
        for cell in cells:
            model, n_trials = cell.variant.model_name, _n_lr_trials(grid, cell)
            n_runs = _n_runs(grid, cell)
            runs += n_runs
            n_tokens = (n_runs - n_trials) * tokens[model] + n_trials * (config.tune_tokens or tokens[model])
            flops += n_tokens * cost[model] * (1 + EVAL_SHARE)
        return runs, flops, hours(flops, runs, speed, jobs)

    def preview_arm(arm: Arm) -> ArmPreview:
        largest = max(tokens[cell.variant.model_name] for cell in arm.cells)
        names = tuple(cell.name for cell in arm.cells)
        return ArmPreview(arm.name, arm.role, names, largest, *summarize(arm.cells))

    arms = tuple(preview_arm(arm) for arm in grid.arms)
    cells, notes = grid.cells, (*_notes(grid), *_power_note(grid, read_pilot_sd(config.pilot)))
    totals = summarize(cells)
    folder = str(study_dir.path)
    return StudyPreview(folder, corpus, arms, len(cells), *totals, jobs, speed, UTILIZATION, notes)


def _n_runs(grid: Grid, cell: Cell) -> int:
    """Return the most runs of a cell; those of the noise floor count for the first baseline."""
    config = grid.config
    screened = {each.name for each in grid.screened_cells}
    screening = config.screening_seeds if cell.name in screened else 0
    is_first = cell.name == grid.arms[0].cells[0].name
    return _n_lr_trials(grid, cell) + screening + config.n_seeds * (2 if is_first and config.verdict else 1)


def _n_lr_trials(grid: Grid, cell: Cell) -> int:
    """Return the runs of the learning-rate search of a cell, on the first grid."""
    return len(grid.config.lr_factors) if grid.config.tune_lr and cell.fixed_lr is None else 0


def _flops_per_token(grid: Grid) -> dict[str, float]:
    """Return the FLOPs of a training token by model; models that differ in `train` alone are counted once."""
    config, by_model = grid.config, {}
    counted: dict[str, float] = {}
    for cell in grid.one_cell_per_model():
        values = build_run_config(config, cell, seed=0, lr=config.lr, tokens=config.tokens or 1)
        size, seq_len = vocab_size(cell.tokenizer(config), config.preset), cell.seq_len(config)
        model = replace(RunConfig.from_dict(values).model_config(size), init="gpt2")
        key = repr((model, seq_len))
        if key not in counted:
            counted[key] = flops_per_token(model, seq_len)
        by_model[cell.variant.model_name] = counted[key]
    return by_model


def _tokens_by_model(grid: Grid, cost: Mapping[str, float], speed: float, jobs: int) -> dict[str, int]:
    """Return the tokens of a run by model. Equal time is estimated by equal FLOPs."""
    config, unit = grid.config, cost[grid.base_model]
    scale = {model: 1.0 if config.match == "tokens" else unit / each for model, each in cost.items()}
    base = config.tokens
    if base is None:
        seconds = 60 * (config.minutes or 0) * jobs - RUN_OVERHEAD_SECONDS * grid.n_runs
        per_token = sum(
            _n_runs(grid, cell) * cost[cell.variant.model_name] * scale[cell.variant.model_name]
            for cell in grid.cells
        )
        base = int(max(0.0, seconds) * UTILIZATION * speed / (per_token * (1 + EVAL_SHARE)))
    return {model: round(base * each) for model, each in scale.items()}


def _power_note(grid: Grid, pilot_sd: float | None) -> list[str]:
    config, n_tests = grid.config, len(grid.arms) - 1
    if not config.verdict:
        return []
    design = config.seed_design()
    effect = detectable_effect(design, config.n_seeds, n_tests)
    source = "not known yet" if pilot_sd is None else "the pilot study"
    return [power_sentence(Power(config.n_seeds, n_tests, effect, pilot_sd, source))]


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
