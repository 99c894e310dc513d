"""`compare`: does a variant beat the best-started standard model on this corpus, at this size?

What is done, in order:
1. measure what a step of every model costs, if the budget is in minutes or matched by time or FLOPs;
2. with `tune_lr`, give every variant from every start the same learning-rate search, on a seed of its own;
3. run every variant from every start with the same seeds;
4. judge: the reference is the standard model from its best start, each variant stands at its best start.
Everything lies in the study's folder, and everything that is there already is not done again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from qkflow.config_io import check_mapping, dataclass_from_dict, parse_count
from qkflow.data import EvalWindows, TrainWindows, prepare
from qkflow.errors import InputError, unknown
from qkflow.studies.analysis import RunData, analyze, best_lr, load_runs
from qkflow.studies.grid import (
    CALIBRATION_SEEDS,
    CALIBRATION_STEPS,
    TUNING_SEED,
    ComparisonConfig,
    Grid,
    RunSpec,
    build_grid,
    check_models,
)
from qkflow.studies.runner.engines import ENGINES, Engine
from qkflow.studies.runner.execution import RunTracker, StudyInterrupted, execute_runs
from qkflow.studies.runner.study_dir import STUDY_FILE, StudyDir
from qkflow.studies.variants import STANDARD, ComponentRegistry
from qkflow.system import resolve_device

if TYPE_CHECKING:
    import pandas

DEFAULT_TOKENS = 200_000
# What one folder holds one answer to; variants, seeds, starts and tuning may grow from call to call.
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
    """The answer: `summary` as in summary.json, `rows` flat for tables, `verdicts` in words."""

    folder: Path
    summary: dict[str, Any]
    runs: list[RunData]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One flat dict per variant, the reference first."""
        from qkflow.report.tables import flat_row

        reference = self.summary["reference"]
        return [flat_row(row) for row in [*([reference] if reference else []), *self.summary["variants"]]]

    @property
    def verdicts(self) -> dict[str, str]:
        return {row["variant"]: row["sentence"] for row in self.summary["variants"]}

    @property
    def complete(self) -> bool:
        return bool(self.summary["runs"]["finished"] == self.summary["runs"]["planned"])

    def to_dataframe(self) -> pandas.DataFrame:
        import pandas

        return pandas.DataFrame(self.rows)


def compare(
    data: str = ComparisonConfig.data,
    *,
    out: str | Path | None = None,
    engine: str = "local",
    jobs: int | None = None,
    threads: int = 1,
    worker_command: Sequence[str] | None = None,
    components: ComponentRegistry | None = None,
    prepare_data: PrepareDataFn | None = None,
    **settings: Any,
) -> Comparison:
    """Compare variants on a corpus; `settings` are those of `Question` (variants, seeds, tokens, preset, …).

    >>> answer = compare("speeches", variants="standard,euler", tokens="200k")   # doctest: +SKIP
    >>> answer.verdicts["euler"]                                                   # doctest: +SKIP
    """
    question = parse_comparison_config(data, settings)
    if engine not in ENGINES:
        raise unknown("--engine", engine, ENGINES)
    if (jobs is not None and jobs < 1) or threads < 1:
        raise InputError("--jobs and --threads must be at least 1")
    grid = build_grid(question, components)
    if components is None:  # other parts than ours are known to other workers than ours
        check_models(grid)
    folder = StudyDir(Path(out) if out else default_study_dir(question))
    folder.check_usable()
    _check_compatible(question, folder)
    if engine == "local":
        resolve_device(question.device)
    corpus = dict((prepare_data or prepare_corpus)(question))  # its errors come before anything is written
    started = ENGINES[engine](worker_command, threads, question.device)
    try:
        with folder.lock():
            _StudyRunner(grid, folder, started, jobs, corpus).run()
            return rebuild_report(folder.path)
    finally:
        started.close()


def rebuild_report(folder: str | Path) -> Comparison:
    """Analyse what a study's folder holds and write its outputs anew; works while it is still running."""
    from qkflow.report import write_outputs

    place = StudyDir(Path(folder))
    study = load_study(place)
    runs = load_runs(place, study)
    comparison = Comparison(place.path, analyze(study, runs), runs)
    write_outputs(place.path, comparison.summary, [run for run in runs if run.phase == "compare"])
    return comparison


def load_study(study_dir: StudyDir) -> dict[str, Any]:
    """What `study.yaml` says, with everything in it that `qkflow compare` writes there."""
    study, path = study_dir.load(), study_dir.path / STUDY_FILE
    parts = {
        "config": ([study["config"]], {field.name for field in fields(ComparisonConfig)}),
        "arms": (study["arms"], {"name", "role", "cells"}),
        "runs": (study["runs"], {"id", "phase", "cell", "seed", "lr", "tokens"}),
    }
    for name, (values, keys) in parts.items():
        for value in values:
            missing = sorted(keys - check_mapping(value, f"{path}: {name}").keys())
            if missing:
                raise InputError(f"{path} is damaged: '{name}' does not say '{missing[0]}'")
    try:
        dataclass_from_dict(ComparisonConfig, study["config"], "question")
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return study


def prepare_corpus(config: ComparisonConfig) -> dict[str, Any]:
    """Tokenise once, before many workers need it; runs are told apart by the text, not by its name."""
    tokens = prepare(config.data, config.tokenizer)
    TrainWindows(
        tokens.tokens("train"), config.seq_len, config.batch_size, seed=0
    )  # refuses too short a text
    EvalWindows(tokens.tokens("validation"), config.seq_len, config.batch_size)
    return {"fingerprint": tokens.fingerprint}


def parse_comparison_config(data: str, settings: Mapping[str, Any]) -> ComparisonConfig:
    """A question from loosely typed settings: lists as comma-separated text, tokens as `200k`."""
    values: dict[str, Any] = {"data": data, **settings}
    for name in ("variants", "controls", "inits", "lr_factors"):
        if name in values:
            values[name] = _parse_list(values[name])
    if "lr_factors" in values:
        try:
            values["lr_factors"] = tuple(float(item) for item in values["lr_factors"])
        except ValueError:
            raise InputError("--lr-factors must be numbers, e.g. 0.5,1,2") from None
    if values.get("tokens") is not None:
        values["tokens"] = parse_count(values["tokens"])
    question = ComparisonConfig.from_dict(values)
    if question.tokens is None and question.minutes is None:
        question = replace(question, tokens=DEFAULT_TOKENS)
    return question


def _parse_list(value: str | Iterable[Any]) -> tuple[Any, ...]:
    """`a,b` or `["a", "b,c"]` as a tuple; `none` as an empty one."""
    texts = [value] if isinstance(value, str) else [str(item) for item in value]
    items = tuple(item.strip() for text in texts for item in text.split(",") if item.strip())
    return () if items == ("none",) else items


def default_study_dir(config: ComparisonConfig) -> Path:
    """The same question has the same folder, so that the same command goes on where it stopped."""
    budget = f"{config.minutes:g}min" if config.minutes else f"{config.tokens}"
    words = f"{config.data}-{config.preset}-{budget}"
    return Path("runs") / re.sub(r"[^A-Za-z0-9_.-]+", "-", words).strip("-.")


def _check_compatible(config: ComparisonConfig, study_dir: StudyDir) -> None:
    earlier = load_study(study_dir)["config"] if study_dir.exists else {}
    for name in _FIXED_PER_STUDY:
        before, now = earlier.get(name), getattr(config, name)
        if earlier and before != now:
            raise InputError(
                f"{study_dir.path} holds a comparison with {name} {before}, not {now}; give another --out"
            )


class _StudyRunner:
    """One comparison at work: plans each phase, writes the plan down, runs it."""

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
        known = load_study(study_dir).get("budgets") if study_dir.exists else {}
        self.token_budgets: dict[str, int] = check_mapping(known, f"{study_dir.path / STUDY_FILE}: budgets")

    def run(self) -> None:
        self.token_budgets = self._compute_token_budgets()
        rates = self._tune_lr() if self.config.tune_lr else {}
        seeds = range(self.config.seeds)
        self._execute(
            "comparing",
            self.grid.build_runs(
                "compare",
                seeds,
                lr_by_cell=rates,
                tokens_by_model=self.token_budgets,
                data_overrides=self.data_overrides,
            ),
        )

    def _execute(self, title: str, runs: list[RunSpec]) -> list[RunTracker]:
        self.runs += runs
        self._save()
        return execute_runs(title, runs, self.study_dir, self.engine, self.jobs)

    def _save(self) -> None:
        self.study_dir.save(
            {
                "config": self.config.to_dict(),
                "command": self.config.to_command(str(self.study_dir.path)),
                "arms": [one.to_dict() for one in self.grid.arms],
                "budgets": self.token_budgets,
                "jobs": self.jobs,
                "runs": [run.to_dict() for run in self.runs],
            }
        )

    def _tune_lr(self) -> dict[str, float]:
        """The learning rate of every cell: the best of the same grid for all."""
        factors = self.config.lr_factors
        runs = self.grid.build_runs(
            "tune",
            [TUNING_SEED],
            lr_factors=factors,
            tokens_by_model=self.token_budgets,
            data_overrides=self.data_overrides,
        )
        tried: dict[str, dict[float, float | None]] = {}
        for one in _require_finished(self._execute("tuning learning rates", runs)):
            loss = (one.run_dir.result() or {}).get("loss") if one.run_dir.is_finished else None
            usable = loss is not None and math.isfinite(loss)
            tried.setdefault(one.spec.cell, {})[one.spec.lr] = loss if usable else None
        return {cell: best_lr(losses) or self.config.lr for cell, losses in tried.items()}

    def _compute_token_budgets(self) -> dict[str, int]:
        """Tokens for every model: equal, or such that time or FLOPs are equal to the standard model's."""
        q, models = self.config, [cell.variant.model_name for cell in self.grid.one_cell_per_model()]
        known = self.token_budgets
        if all(model in known for model in models):
            return {model: known[model] for model in models}
        if q.minutes is None and q.match == "tokens":
            return dict.fromkeys(models, q.tokens or DEFAULT_TOKENS)
        costs = self._calibrate()
        base = known.get(STANDARD) or q.tokens or self._affordable_tokens(costs)
        step = q.batch_size * q.seq_len
        budgets = {}
        for model in models:
            ratio = {
                "tokens": 1.0,
                "time": costs[STANDARD].step_seconds / costs[model].step_seconds,
                "flops": costs[STANDARD].flops_per_token / costs[model].flops_per_token,
            }[q.match]
            budgets[model] = known.get(model) or max(1, round(base * ratio / step)) * step
        return budgets

    def _calibrate(self) -> dict[str, TrainingCost]:
        """Short runs of every model in turn, as many at once as there will be later."""
        steps = CALIBRATION_STEPS * self.config.batch_size * self.config.seq_len
        cells = self.grid.one_cell_per_model()
        models = {cell.name: cell.variant.model_name for cell in cells}
        tokens = dict.fromkeys(models.values(), steps)
        runs = self.grid.build_runs(
            "calibrate",
            CALIBRATION_SEEDS,
            cells=cells,
            tokens_by_model=tokens,
            data_overrides=self.data_overrides,
        )
        measured: dict[str, list[TrainingCost]] = {}
        for one in _require_finished(self._execute("measuring", runs)):
            if not one.run_dir.is_finished:
                raise InputError(f"{one.spec.cell} could not be measured: {one.message}")
            result = one.run_dir.result() or {}
            training = result["step_seconds"] * CALIBRATION_STEPS
            around = max(0.0, (one.wall_seconds or training) - training)
            cost = TrainingCost(result["step_seconds"], result["flops_per_token"], around)
            measured.setdefault(models[one.spec.cell], []).append(cost)
        return {model: TrainingCost.median_of(costs) for model, costs in measured.items()}

    def _affordable_tokens(self, costs: dict[str, TrainingCost]) -> int:
        """The tokens per run that fill `minutes`, start-up and evaluation included."""
        q, each = self.config, [costs[cell.variant.model_name] for cell in self.grid.cells]
        count = len(each) * (q.seeds + (len(q.lr_factors) if q.tune_lr else 0))
        average = TrainingCost(*(sum(values) / len(each) for values in zip(*map(astuple, each), strict=True)))
        return affordable_steps(q.minutes or 0, count, self.jobs, average) * q.batch_size * q.seq_len


@dataclass(frozen=True)
class TrainingCost:
    """What a model costs: a step, a token, and everything around the steps (start-up, evaluation)."""

    step_seconds: float
    flops_per_token: float
    overhead_seconds: float

    @classmethod
    def median_of(cls, costs: Sequence[TrainingCost]) -> TrainingCost:
        return cls(*(median(values) for values in zip(*map(astuple, costs), strict=True)))


def affordable_steps(minutes: float, n_runs: int, jobs: int, cost: TrainingCost) -> int:
    """The steps each of `runs` runs can make, `jobs` at a time, for all to be done in `minutes`."""
    rounds = math.ceil(n_runs / jobs)
    steps = int((60 * minutes / rounds - cost.overhead_seconds) / cost.step_seconds)
    if steps < CALIBRATION_STEPS:
        need = rounds * (cost.overhead_seconds + CALIBRATION_STEPS * cost.step_seconds) / 60
        raise InputError(
            f"--minutes {minutes:g} is too short for {n_runs} runs, {jobs} at a time; "
            f"give at least {need:.2g}, or fewer variants, starts or seeds"
        )
    return steps


def _require_finished(trackers: list[RunTracker]) -> list[RunTracker]:
    """What later phases rest on must not be half there; of the runs only their numbers are wanted."""
    if any(one.status == "interrupted" for one in trackers):
        raise StudyInterrupted
    for one in trackers:
        one.run_dir.delete_model()
    return trackers
