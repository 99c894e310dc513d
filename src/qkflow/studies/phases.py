"""The phases of a comparison, in order.

1. Measure the cost of a step of every model, if the budget is in minutes or matched by time or FLOPs.
2. With `tune_lr`, search the learning rate of every variant and init on the same grid, on a separate seed.
3. Screen: train every variant and baseline with every init. The screening seeds choose the inits, and retire
   those that are clearly worse.
4. Judge: train what is left on fresh seeds, the same for all, in rounds if `seeds` is auto, beside the A/A
   arm: the reference with other inits and batch orders.
5. With `finetune`, fine-tune every trained model on every task.

Every phase saves the plan before it runs, and finished runs are never repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from qkflow import console
from qkflow.errors import InputError
from qkflow.studies.analysis import analyze, screen_arms
from qkflow.studies.budgets import TrainingCost, affordable_steps
from qkflow.studies.design import DECIDED, Verdict
from qkflow.studies.finetune.dataset import TaskExamples
from qkflow.studies.finetune.study import plan_runs as plan_finetune_runs
from qkflow.studies.grid import (
    COST_SEEDS,
    COST_STEPS,
    NOISE_FLOOR_SEED,
    SCREENING_SEED,
    TUNING_SEED,
    Grid,
    RunSpec,
)
from qkflow.studies.plan import PlannedArm, PlannedRun, StudyPlan
from qkflow.studies.results import ArmSummary
from qkflow.studies.run_data import load_runs
from qkflow.studies.runner.engines import Engine
from qkflow.studies.runner.execution import ExecutionTime, RunTracker, StudyInterrupted, execute_runs
from qkflow.studies.runner.study_dir import StudyDir
from qkflow.studies.sentences import power_sentence
from qkflow.studies.tuning import tune_lr


def _date_arms(
    grid: Grid, now: str, earlier: StudyPlan | None, study_dir: StudyDir
) -> tuple[PlannedArm, ...]:
    """Return the planned arms with the time they were added, which an earlier plan keeps."""
    known = {arm.name if arm.role != "reference" else "": arm for arm in (earlier.arms if earlier else ())}
    finished = sum(study_dir.run_dir(run.id).is_finished for run in (earlier.runs if earlier else ()))
    arms = []
    for arm in (each.plan() for each in grid.arms):
        before = known.get(arm.name if arm.role != "reference" else "")
        dates = (before.added_at, before.runs_before) if before else (now, finished)
        arms.append(replace(arm, added_at=dates[0], runs_before=dates[1]))
    return tuple(arms)


class StudyRunner:
    """Plans the phases of one comparison, saves each plan, and executes it."""

    def __init__(
        self,
        grid: Grid,
        study_dir: StudyDir,
        engine: Engine,
        jobs: int | None,
        data_overrides: dict[str, dict[str, Any]],
        pilot_sd: float | None = None,
    ) -> None:
        self.pilot_sd = pilot_sd
        self.grid, self.config, self.study_dir, self.engine = grid, grid.config, study_dir, engine
        self.jobs, self.data_overrides = jobs or engine.default_jobs(), data_overrides
        self.runs: list[RunSpec] = []
        earlier = StudyPlan.load(study_dir) if study_dir.exists else None
        self.token_budgets = earlier.budgets if earlier else {}
        # kept in study.yaml until their phase is planned again, so that an interrupted resume hides nothing
        self.earlier_runs = earlier.runs if earlier else ()
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self.created_at = earlier.created_at if earlier else now
        self.arms = _date_arms(grid, now, earlier, study_dir)
        self.execution_time = ExecutionTime()

    def run(self) -> None:
        self._print_power()
        self.token_budgets = self._compute_token_budgets()
        lr_by_cell = self._tune_lr() if self.config.tune_lr else {}
        seeds = range(SCREENING_SEED, SCREENING_SEED + self.config.screening_seeds)
        cells = self.grid.screened_cells
        runs = self._build_runs("screen", seeds, cells=cells, lr_by_cell=lr_by_cell)
        _require_finished(self._execute("screening inits", runs))
        self._judge(lr_by_cell)

    def _judge(self, lr_by_cell: Mapping[str, float]) -> None:
        """Train all cells in the race on the judged seeds, look, and repeat for the undecided arms."""
        screenings = screen_arms(self.plan(), load_runs(self.study_dir, self.plan()))
        by_name = {cell.name: cell for cell in self.grid.cells}
        decided: set[str] = set()
        before = 0
        for n in self.config.seed_design().looks or (self.config.n_seeds,):
            arms = [s for arm, s in zip(self.arms, screenings, strict=True) if arm.name not in decided]
            names = dict.fromkeys(cell.name for screening in arms for cell in screening.racing)
            runs = self._build_runs(
                "compare", range(before, n), cells=[by_name[name] for name in names], lr_by_cell=lr_by_cell
            )
            if self.config.verdict:
                repeats = range(NOISE_FLOOR_SEED + before, NOISE_FLOOR_SEED + n)
                reference = [by_name[screenings[0].leader.name]]
                runs += self._build_runs("noise", repeats, cells=reference, lr_by_cell=lr_by_cell)
            trackers = self._execute(f"comparing, {n} seeds", runs)
            _delete_models(tracker for tracker in trackers if tracker.spec.phase == "noise")
            before = n
            summary = analyze(self.plan(), load_runs(self.study_dir, self.plan()))
            decided |= {arm.variant for arm in summary.variants if _is_closed(arm)}
            if len(decided) == len(summary.variants):
                break

    def _print_power(self) -> None:
        """Say before the first run which effect the study can show."""
        if not self.config.verdict:
            return
        plan = self.plan()
        runs = load_runs(self.study_dir, plan) if self.earlier_runs else []
        power = analyze(plan, runs, self.pilot_sd).power
        if power is not None:
            console.err.print(power_sentence(power), markup=False, highlight=False, soft_wrap=True)

    def finetune(self, tasks: Sequence[TaskExamples], engine: Engine) -> None:
        """Fine-tune the models of the finished compared runs; `engine` starts the workers."""
        compared = [run for run in self.runs if run.phase == "compare"]
        runs = plan_finetune_runs(self.config, tasks, compared, self.study_dir)
        self._execute("fine-tuning", runs, engine)

    def _build_runs(self, phase: str, seeds: Sequence[int], **options: Any) -> list[RunSpec]:
        budgets = {"tokens_by_model": self.token_budgets, **options}
        return self.grid.build_runs(phase, seeds, data_overrides=self.data_overrides, **budgets)

    def _execute(self, title: str, runs: list[RunSpec], engine: Engine | None = None) -> list[RunTracker]:
        self.runs += runs
        self.plan().save(self.study_dir)
        return execute_runs(
            title, runs, self.study_dir, engine or self.engine, self.jobs, self.execution_time
        )

    def _planned_runs(self) -> tuple[PlannedRun, ...]:
        planned = [run.plan() for run in self.runs]
        replaced = {(run.phase, run.cell, run.seed) for run in planned}
        cells = {cell.name for cell in self.grid.cells}
        earlier = (run for run in self.earlier_runs if run.cell.partition("/")[0] in cells)
        kept = (run for run in earlier if (run.phase, run.cell, run.seed) not in replaced)
        return (*planned, *kept)

    def plan(self) -> StudyPlan:
        return StudyPlan(
            config=self.config,
            command=self.config.to_command(str(self.study_dir.path)),
            arms=self.arms,
            budgets=self.token_budgets,
            jobs=self.jobs,
            runs=self._planned_runs(),
            created_at=self.created_at,
        )

    def _tune_lr(self) -> dict[str, float]:
        """Return the best learning rate of every cell that does not fix its own."""
        cells = [cell for cell in self.grid.cells if cell.fixed_lr is None]
        base_lr = {cell.name: cell.base_lr(self.config) for cell in cells}
        for cell in self.grid.cells:
            if cell.fixed_lr is not None:
                console.err.print(
                    f"{cell.name}: train.lr is fixed at {cell.fixed_lr:g} and not tuned", markup=False
                )

        budgets, least = self.token_budgets, self.config.tune_tokens
        if least is not None:
            share = min(1.0, least / max(budgets.values()))
            budgets = {model: round(tokens * share) for model, tokens in budgets.items()}

        def run_trials(factors: Sequence[float]) -> dict[str, dict[float, float | None]]:
            losses: dict[str, dict[float, float | None]] = {}
            runs = self._build_runs(
                "tune", [TUNING_SEED], cells=cells, lr_factors=factors, tokens_by_model=budgets
            )
            factor_by_lr = {(name, lr * factor): factor for name, lr in base_lr.items() for factor in factors}
            for tracker in _require_finished(self._execute("tuning learning rates", runs)):
                loss = (tracker.run_dir.result() or {}).get("loss") if tracker.run_dir.is_finished else None
                is_finite = loss is not None and math.isfinite(loss)
                by_factor = losses.setdefault(tracker.spec.cell, {})
                by_factor[factor_by_lr[tracker.spec.cell, tracker.spec.lr]] = loss if is_finite else None
            return losses

        factors = tune_lr(run_trials, self.config.lr_factors)
        return {name: base_lr[name] * factor for name, factor in factors.items()}

    def _compute_token_budgets(self) -> dict[str, int]:
        """Return tokens by model: equal, or scaled to the time or FLOPs of the first baseline."""
        config, known, unit = self.config, self.token_budgets, self.grid.base_model
        cells = {cell.variant.model_name: cell for cell in self.grid.one_cell_per_model()}
        models = list(cells)
        if all(model in known for model in models):
            return {model: known[model] for model in models}
        if config.tokens is not None and config.match == "tokens":
            return dict.fromkeys(models, config.tokens)
        costs = self._measure_costs()
        base = known.get(unit) or config.tokens or self._affordable_tokens(costs)
        budgets = {}
        for model, cell in cells.items():
            ratio = {
                "tokens": 1.0,
                "time": costs[unit].token_seconds / costs[model].token_seconds,
                "flops": costs[unit].flops_per_token / costs[model].flops_per_token,
            }[config.match]
            per_step = cell.tokens_per_step(config)
            matched = max(1, round(base * ratio / per_step)) * per_step
            # the unit keeps its tokens, so that its runs are those of a comparison with equal tokens
            budgets[model] = known.get(model) or (base if ratio == 1 else matched)
        return budgets

    def _measure_costs(self) -> dict[str, TrainingCost]:
        """Measure every model with short runs, as many at a time as later."""
        cells = self.grid.one_cell_per_model()
        models = {cell.name: cell.variant.model_name for cell in cells}
        tokens_per_step = {models[cell.name]: cell.tokens_per_step(self.config) for cell in cells}
        tokens = {model: COST_STEPS * count for model, count in tokens_per_step.items()}
        runs = self._build_runs("cost", COST_SEEDS, cells=cells, tokens_by_model=tokens)
        measured: dict[str, list[TrainingCost]] = {}
        for tracker in _require_finished(self._execute("measuring", runs)):
            if not tracker.run_dir.is_finished:
                raise InputError(
                    f"the cost of {tracker.spec.cell} cannot be measured: {tracker.message}",
                    code="cost-not-measured",
                )
            result = tracker.run_dir.result() or {}
            training = result["step_seconds"] * COST_STEPS
            overhead = max(0.0, (tracker.wall_seconds or training) - training)
            model = models[tracker.spec.cell]
            token_seconds = result["step_seconds"] / tokens_per_step[model]
            cost = TrainingCost(token_seconds, result["flops_per_token"], overhead)
            measured.setdefault(model, []).append(cost)
        return {model: TrainingCost.median_of(costs) for model, costs in measured.items()}

    def _affordable_tokens(self, costs: Mapping[str, TrainingCost]) -> int:
        """Return the tokens per run that fill `minutes`, with start-up and evaluation."""
        config, each = self.config, [costs[cell.variant.model_name] for cell in self.grid.cells]
        average = TrainingCost.mean_of(each)
        n_runs, per_step = self.grid.n_runs, config.tokens_per_step
        return affordable_steps(config.minutes or 0, n_runs, self.jobs, average, per_step) * per_step


def _is_closed(arm: ArmSummary) -> bool:
    """Whether more seeds cannot change the verdict: it is decided, not tested, or a run has failed."""
    return arm.verdict in (*DECIDED, Verdict.REFERENCE) or bool(arm.failed_seeds)


def _require_finished(trackers: list[RunTracker]) -> list[RunTracker]:
    """Raise if a run that later phases need was interrupted; delete the weights, which they do not need."""
    if any(tracker.status == "interrupted" for tracker in trackers):
        raise StudyInterrupted
    _delete_models(trackers)
    return trackers


def _delete_models(trackers: Iterable[RunTracker]) -> None:
    for tracker in trackers:
        tracker.run_dir.delete_model()
