"""What a comparison computes: the runs, tokens and FLOPs of every arm, on any machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from qkflow.models.config import ModelConfig
from qkflow.models.cost import flops_per_token
from qkflow.studies.estimate import vocab_size
from qkflow.studies.finetune.config import parse_tasks
from qkflow.studies.finetune.workload import finetune_flops
from qkflow.studies.grid import EVAL_SHARE, Cell, Grid, build_run_config
from qkflow.studies.plan import Role
from qkflow.studies.power import detectable_effect
from qkflow.studies.results import Power
from qkflow.training.config import RunConfig, TrainConfig


@dataclass(frozen=True)
class CellWorkload:
    """All runs of one cell. `tokens` are those of all training runs together, evaluation included."""

    cell: str
    model: str  # name of its model: cells that differ in the init share it
    runs: int
    tokens: float
    flops: float
    finetune_flops: float = 0.0  # a part of `flops`, in fp32


@dataclass(frozen=True)
class ArmWorkload:
    """The runs of one arm. `tokens` are per run, the largest of its cells."""

    name: str
    role: Role
    cells: tuple[CellWorkload, ...]
    tokens: int

    @property
    def runs(self) -> int:
        return sum(cell.runs for cell in self.cells)

    @property
    def flops(self) -> float:
        return sum(cell.flops for cell in self.cells)


def arm_workloads(
    grid: Grid, cost: Mapping[str, float], tokens: Mapping[str, int]
) -> tuple[ArmWorkload, ...]:
    """Return the work of every arm; `cost` (FLOPs per token) and `tokens` (per run) are by model."""
    finetuning = {}
    if grid.config.finetune:
        finetuning = flops_by_model(grid, lambda model, seq_len: finetune_flops(grid.config, model))
    workloads = {cell.name: _cell_workload(grid, cell, cost, tokens, finetuning) for cell in grid.cells}
    return tuple(
        ArmWorkload(
            arm.name,
            arm.role,
            tuple(workloads[cell.name] for cell in arm.cells),
            max(tokens[cell.variant.model_name] for cell in arm.cells),
        )
        for arm in grid.arms
    )


def unique_cells(arms: Sequence[ArmWorkload]) -> list[CellWorkload]:
    """Return every cell once: two arms may share one."""
    return list({cell.cell: cell for arm in arms for cell in arm.cells}.values())


def _cell_workload(
    grid: Grid,
    cell: Cell,
    cost: Mapping[str, float],
    tokens: Mapping[str, int],
    finetuning: Mapping[str, float],
) -> CellWorkload:
    config, model = grid.config, cell.variant.model_name
    n_runs, n_trials = count_runs(grid, cell), count_lr_trials(grid, cell)
    n_tokens = (n_runs - n_trials) * tokens[model] + n_trials * (config.tune_tokens or tokens[model])
    total = n_tokens * (1 + EVAL_SHARE)
    n_models = config.n_seeds  # one per judged seed
    finetune = n_models * finetuning.get(model, 0.0)
    n_runs += n_models * len(parse_tasks(config.finetune))
    return CellWorkload(cell.name, model, n_runs, total, total * cost[model] + finetune, finetune)


def count_runs(grid: Grid, cell: Cell) -> int:
    """Return the most runs of a cell; those of the noise floor count for the first baseline."""
    config = grid.config
    screened = {each.name for each in grid.screened_cells}
    screening = config.screening_seeds if cell.name in screened else 0
    is_first = cell.name == grid.arms[0].cells[0].name
    judged = config.n_seeds * (2 if is_first and config.verdict else 1)
    return count_lr_trials(grid, cell) + screening + judged


def count_lr_trials(grid: Grid, cell: Cell) -> int:
    """Return the runs of the learning-rate search of a cell, on the first grid."""
    return len(grid.config.lr_factors) if grid.config.tune_lr and cell.fixed_lr is None else 0


@dataclass(frozen=True)
class TrainedModel:
    """A model of a comparison, and how it is trained."""

    name: str
    config: ModelConfig
    seq_len: int
    train: TrainConfig


def trained_models(grid: Grid) -> list[TrainedModel]:
    """Return the models of a comparison; the init of the parameters is left out."""
    config, models = grid.config, []
    for cell in grid.one_cell_per_model():
        lr = cell.base_lr(config)
        values = build_run_config(config, cell, seed=0, lr=lr, tokens=config.tokens or 1)
        size, run = vocab_size(cell.tokenizer(config), config.preset), RunConfig.from_dict(values)
        model = replace(run.model_config(size), init="gpt2")
        models.append(TrainedModel(cell.variant.model_name, model, cell.seq_len(config), run.train))
    return models


def flops_by_model(
    grid: Grid, count: Callable[[ModelConfig, int], float] = flops_per_token
) -> dict[str, float]:
    """Return the FLOPs of a training token by model; models that differ in `train` alone are counted once."""
    by_model, counted = {}, {}
    for model in trained_models(grid):
        key = repr((model.config, model.seq_len))
        if key not in counted:
            counted[key] = count(model.config, model.seq_len)
        by_model[model.name] = counted[key]
    return by_model


def token_scales(grid: Grid, cost: Mapping[str, float]) -> dict[str, float]:
    """Return the tokens of a run by model, relative to the first baseline. Equal time means equal FLOPs."""
    unit = cost[grid.base_model]
    return {model: 1.0 if grid.config.match == "tokens" else unit / each for model, each in cost.items()}


def study_power(grid: Grid, sd: float | None, source: str) -> Power | None:
    """Return the effect that a comparison can show; None without verdicts. `sd`: of paired differences."""
    config, n_tests = grid.config, len(grid.arms) - 1
    if not config.verdict:
        return None
    effect = detectable_effect(config.seed_design(), config.n_seeds, n_tests)
    return Power(config.n_seeds, n_tests, effect, sd, source)
