"""`compare`: train variants of attention and the standard model, and judge the differences.

In order:
1. measure the cost of a step of every model, if the budget is in minutes or matched by time or FLOPs;
2. with `tune_lr`, search the learning rate of every variant and init on the same grid, on a separate seed;
3. train every variant with every init and the same seeds;
4. with `finetune`, fine-tune every trained model on every task;
5. analyze: the reference is the standard model at its best init, and every variant is at its own best init.
Everything is stored in the study's folder, and finished runs are never repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from qkflow.data import EvalWindows, TrainWindows, prepare
from qkflow.errors import InputError
from qkflow.studies.analysis import RunData, analyze, best_lr, load_runs
from qkflow.studies.config import ComparisonConfig, EngineName, ExecutionConfig
from qkflow.studies.finetune.dataset import TaskExamples
from qkflow.studies.finetune.study import WORKER_COMMAND as FINETUNE_WORKER
from qkflow.studies.finetune.study import load_tasks
from qkflow.studies.finetune.study import plan_runs as plan_finetune_runs
from qkflow.studies.grid import (
    CALIBRATION_SEEDS,
    CALIBRATION_STEPS,
    TUNING_SEED,
    Grid,
    RunSpec,
    build_grid,
    check_models,
)
from qkflow.studies.plan import StudyPlan
from qkflow.studies.results import StudySummary
from qkflow.studies.runner.engines import ENGINES, Engine
from qkflow.studies.runner.execution import RunTracker, StudyInterrupted, execute_runs
from qkflow.studies.runner.study_dir import StudyDir
from qkflow.studies.variants import STANDARD, ComponentRegistry
from qkflow.system import resolve_device

if TYPE_CHECKING:
    import pandas

# One folder holds one comparison with these options; variants, inits, seeds and tuning may be extended.
_FIXED_PER_STUDY = (
    "data",
    "preset",
    "tokenizer",
    "seq_len",
    "batch_size",
    "schedule",
    "tokens",
    "minutes",
    "match",
    "lr",
    "device",
)

PrepareDataFn = Callable[[ComparisonConfig], Mapping[str, Any]]


@dataclass(frozen=True)
class Comparison:
    """A study's folder, the summary of its runs, and the runs themselves."""

    folder: Path
    summary: StudySummary
    runs: list[RunData]

    @property
    def compared_runs(self) -> list[RunData]:
        """The runs that are compared, without those that only measured costs or tuned."""
        return [run for run in self.runs if run.phase == "compare"]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One flat dict per arm, the reference first."""
        return [arm.to_row() for arm in self.summary.arms]

    @property
    def verdicts(self) -> dict[str, str]:
        """The verdict of every variant as a sentence."""
        return {arm.variant: arm.sentence for arm in self.summary.variants}

    @property
    def is_complete(self) -> bool:
        return self.summary.is_complete

    def to_dataframe(self) -> pandas.DataFrame:
        import pandas

        return pandas.DataFrame(self.rows)


def compare(
    data: str = ComparisonConfig.data,
    *,
    out: str | Path | None = None,
    engine: EngineName = "local",
    jobs: int | None = None,
    threads: int = 1,
    worker_command: Sequence[str] | None = None,
    components: ComponentRegistry | None = None,
    prepare_data: PrepareDataFn | None = None,
    **settings: Any,
) -> Comparison:
    """Compare variants on a corpus; `settings` are the fields of `ComparisonConfig`.

    The runs and `study.yaml` are written to `out`. `qkflow.report.write_outputs(comparison)` adds
    report.html, summary.json and the CSV files.

    >>> comparison = compare("speeches", variants="standard,euler", tokens="200k")   # doctest: +SKIP
    >>> comparison.verdicts["euler"]                                                  # doctest: +SKIP
    """
    config = ComparisonConfig.parse(data=data, **settings)
    ExecutionConfig(engine, jobs, threads).check()
    grid = build_grid(config, components)
    if components is None:  # other components need another worker, which can build them
        check_models(grid)
    study_dir = StudyDir(Path(out) if out else config.default_folder())
    study_dir.check_usable()
    _check_compatible(config, study_dir)
    if engine == "local":
        resolve_device(config.device)
    tasks = load_tasks(config)
    data_overrides = dict((prepare_data or prepare_corpus)(config))  # raises before anything is written
    started = ENGINES[engine](worker_command, threads, config.device)
    try:
        with study_dir.lock():
            runner = _StudyRunner(grid, study_dir, started, jobs, data_overrides)
            runner.run()
            if tasks:
                runner.finetune(tasks, ENGINES[engine](FINETUNE_WORKER, threads, config.device))
    finally:
        started.close()
    return load_comparison(study_dir.path)


def load_comparison(folder: str | Path) -> Comparison:
    """Analyze the runs in a study's folder; the study may still be running."""
    study_dir = StudyDir(Path(folder))
    plan = StudyPlan.load(study_dir)
    runs = load_runs(study_dir, plan)
    return Comparison(study_dir.path, analyze(plan, runs), runs)


def prepare_corpus(config: ComparisonConfig) -> dict[str, Any]:
    """Tokenize the corpus once for all workers; return its fingerprint, a part of the config of every run."""
    tokens = prepare(config.data, config.tokenizer)
    # both raise InputError if the corpus is too short
    TrainWindows(tokens.tokens("train"), config.seq_len, config.batch_size, seed=0)
    EvalWindows(tokens.tokens("validation"), config.seq_len, config.batch_size)
    return {"fingerprint": tokens.fingerprint}


def _check_compatible(config: ComparisonConfig, study_dir: StudyDir) -> None:
    if not study_dir.exists:
        return
    earlier = StudyPlan.load(study_dir).config
    for name in _FIXED_PER_STUDY:
        before, now = getattr(earlier, name), getattr(config, name)
        if before != now:
            raise InputError(
                f"{study_dir.path} holds a comparison with {name} {before}, not {now}: use another --out",
                code="other-study",
            )


class _StudyRunner:
    """Plans the phases of one comparison, saves each plan, and executes it."""

    def __init__(
        self,
        grid: Grid,
        study_dir: StudyDir,
        engine: Engine,
        jobs: int | None,
        data_overrides: dict[str, Any],
    ) -> None:
        self.grid, self.config, self.study_dir, self.engine = grid, grid.config, study_dir, engine
        self.jobs, self.data_overrides = jobs or engine.default_jobs(), data_overrides
        self.runs: list[RunSpec] = []
        self.token_budgets = StudyPlan.load(study_dir).budgets if study_dir.exists else {}

    def run(self) -> None:
        self.token_budgets = self._compute_token_budgets()
        lr_by_cell = self._tune_lr() if self.config.tune_lr else {}
        runs = self._build_runs("compare", range(self.config.seeds), lr_by_cell=lr_by_cell)
        self._execute("comparing", runs)

    def finetune(self, tasks: Sequence[TaskExamples], engine: Engine) -> None:
        """Fine-tune the models of the finished compared runs; `engine` starts the workers."""
        compared = [run for run in self.runs if run.phase == "compare"]
        runs = plan_finetune_runs(self.config, tasks, compared, self.study_dir)
        try:
            self._execute("fine-tuning", runs, engine)
        finally:
            engine.close()

    def _build_runs(self, phase: str, seeds: Sequence[int], **options: Any) -> list[RunSpec]:
        budgets = {"tokens_by_model": self.token_budgets, **options}
        return self.grid.build_runs(phase, seeds, data_overrides=self.data_overrides, **budgets)

    def _execute(self, title: str, runs: list[RunSpec], engine: Engine | None = None) -> list[RunTracker]:
        self.runs += runs
        plan = StudyPlan(
            config=self.config,
            command=self.config.to_command(str(self.study_dir.path)),
            arms=tuple(arm.plan() for arm in self.grid.arms),
            budgets=self.token_budgets,
            jobs=self.jobs,
            runs=tuple(run.plan() for run in self.runs),
        )
        plan.save(self.study_dir)
        return execute_runs(title, runs, self.study_dir, engine or self.engine, self.jobs)

    def _tune_lr(self) -> dict[str, float]:
        """Return the best learning rate of every cell."""
        runs = self._build_runs("tune", [TUNING_SEED], lr_factors=self.config.lr_factors)
        losses: dict[str, dict[float, float | None]] = {}
        for tracker in _require_finished(self._execute("tuning learning rates", runs)):
            loss = (tracker.run_dir.result() or {}).get("loss") if tracker.run_dir.is_finished else None
            is_finite = loss is not None and math.isfinite(loss)
            losses.setdefault(tracker.spec.cell, {})[tracker.spec.lr] = loss if is_finite else None
        return {cell: best_lr(by_lr) or self.config.lr for cell, by_lr in losses.items()}

    def _compute_token_budgets(self) -> dict[str, int]:
        """Return tokens by model: equal, or scaled to the time or FLOPs of the standard model."""
        config, known = self.config, self.token_budgets
        models = [cell.variant.model_name for cell in self.grid.one_cell_per_model()]
        if all(model in known for model in models):
            return {model: known[model] for model in models}
        if config.tokens is not None and config.match == "tokens":
            return dict.fromkeys(models, config.tokens)
        costs = self._calibrate()
        base = known.get(STANDARD) or config.tokens or self._affordable_tokens(costs)
        budgets = {}
        for model in models:
            ratio = {
                "tokens": 1.0,
                "time": costs[STANDARD].step_seconds / costs[model].step_seconds,
                "flops": costs[STANDARD].flops_per_token / costs[model].flops_per_token,
            }[config.match]
            steps = max(1, round(base * ratio / config.tokens_per_step))
            budgets[model] = known.get(model) or steps * config.tokens_per_step
        return budgets

    def _calibrate(self) -> dict[str, TrainingCost]:
        """Measure every model with short runs, as many at a time as later."""
        cells = self.grid.one_cell_per_model()
        models = {cell.name: cell.variant.model_name for cell in cells}
        tokens = dict.fromkeys(models.values(), CALIBRATION_STEPS * self.config.tokens_per_step)
        runs = self._build_runs("calibrate", CALIBRATION_SEEDS, cells=cells, tokens_by_model=tokens)
        measured: dict[str, list[TrainingCost]] = {}
        for tracker in _require_finished(self._execute("measuring", runs)):
            if not tracker.run_dir.is_finished:
                raise InputError(
                    f"the cost of {tracker.spec.cell} cannot be measured: {tracker.message}",
                    code="calibration-failed",
                )
            result = tracker.run_dir.result() or {}
            training = result["step_seconds"] * CALIBRATION_STEPS
            overhead = max(0.0, (tracker.wall_seconds or training) - training)
            cost = TrainingCost(result["step_seconds"], result["flops_per_token"], overhead)
            measured.setdefault(models[tracker.spec.cell], []).append(cost)
        return {model: TrainingCost.median_of(costs) for model, costs in measured.items()}

    def _affordable_tokens(self, costs: Mapping[str, TrainingCost]) -> int:
        """Return the tokens per run that fill `minutes`, with start-up and evaluation."""
        config, each = self.config, [costs[cell.variant.model_name] for cell in self.grid.cells]
        n_runs = len(each) * (config.seeds + (len(config.lr_factors) if config.tune_lr else 0))
        average = TrainingCost(*(sum(values) / len(each) for values in zip(*map(astuple, each), strict=True)))
        return affordable_steps(config.minutes or 0, n_runs, self.jobs, average) * config.tokens_per_step


@dataclass(frozen=True)
class TrainingCost:
    """Cost of a model. `overhead_seconds` is the time of a run outside its steps (start-up, evaluation)."""

    step_seconds: float
    flops_per_token: float
    overhead_seconds: float

    @classmethod
    def median_of(cls, costs: Sequence[TrainingCost]) -> TrainingCost:
        return cls(*(median(values) for values in zip(*map(astuple, costs), strict=True)))


def affordable_steps(minutes: float, n_runs: int, jobs: int, cost: TrainingCost) -> int:
    """Return the steps per run with which `n_runs` runs, `jobs` at a time, finish in `minutes`."""
    rounds = math.ceil(n_runs / jobs)
    steps = int((60 * minutes / rounds - cost.overhead_seconds) / cost.step_seconds)
    if steps < CALIBRATION_STEPS:
        least = rounds * (cost.overhead_seconds + CALIBRATION_STEPS * cost.step_seconds) / 60
        raise InputError(
            f"--minutes {minutes:g} is too short for {n_runs} runs, {jobs} at a time: "
            f"use at least {least:.2g}, or fewer variants, inits or seeds",
            code="minutes-too-short",
        )
    return steps


def _require_finished(trackers: list[RunTracker]) -> list[RunTracker]:
    """Raise if a run that later phases need was interrupted; delete the weights, which they do not need."""
    if any(tracker.status == "interrupted" for tracker in trackers):
        raise StudyInterrupted
    for tracker in trackers:
        tracker.run_dir.delete_model()
    return trackers
