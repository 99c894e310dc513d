"""`compare`: train variants and baselines, and judge the differences. `phases` has the order of the runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkflow.data import EvalWindows, TrainWindows, prepare
from qkflow.errors import InputError, join_limited
from qkflow.studies.analysis import analyze
from qkflow.studies.cards import notebook_html
from qkflow.studies.config import ComparisonConfig, ExecutionConfig
from qkflow.studies.finetune.config import check_source
from qkflow.studies.finetune.study import WORKER_MODULE as FINETUNE_WORKER
from qkflow.studies.finetune.study import load_tasks
from qkflow.studies.grid import (
    Cell,
    Grid,
    build_grid,
    check_models,
)
from qkflow.studies.phases import StudyRunner
from qkflow.studies.plan import PlannedArm, StudyPlan
from qkflow.studies.record import read_record, restore_runs, write_record
from qkflow.studies.results import StudySummary
from qkflow.studies.run_data import RunData, load_runs
from qkflow.studies.runner import build_engine
from qkflow.studies.runner.execution import ExecutionTime
from qkflow.studies.runner.study_dir import StudyDir
from qkflow.studies.variants import ComponentRegistry
from qkflow.system import resolve_device

if TYPE_CHECKING:
    import pandas

# One folder holds one comparison with these options.
_FIXED_PER_STUDY = (
    "data",
    "preset",
    "tokenizer",
    "seq_len",
    "batch_size",
    "accumulate",
    "schedule",
    "precision",
    "tokens",
    "minutes",
    "match",
    "lr",
    "screening_seeds",
    "device",
)
# Changing these after a look at the results would raise the rate of false verdicts.
_FIXED_BY_RESULTS = (
    *("verdict", "seeds", "max_seeds", "margin", "confidence"),
    *("tune_lr", "tune_tokens", "lr_factors"),
)

PrepareDataFn = Callable[[ComparisonConfig], Mapping[str, Any]]


@dataclass(frozen=True, repr=False)
class Comparison:
    """A study's folder, the summary of its runs, and the runs themselves."""

    folder: Path
    summary: StudySummary
    runs: list[RunData]
    execution_time: ExecutionTime | None = None  # of this call; None if the comparison was only loaded

    @property
    def compared_runs(self) -> list[RunData]:
        """The runs that are compared, without those that only measured costs or tuned."""
        return [run for run in self.runs if run.phase == "compare"]

    def runs_of(self, cell: str) -> list[RunData]:
        """Return the compared runs of a cell, one per seed."""
        return [run for run in self.compared_runs if run.cell == cell]

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

    def __repr__(self) -> str:
        """Return folder and verdicts in a few lines; the fields hold every number of every run."""
        first = f"Comparison({str(self.folder)!r}): {self.summary.headline}"
        return "\n".join((first, *self.verdicts.values()))

    def _repr_html_(self) -> str:
        """Return the verdict cards, which a notebook shows for the last value of a cell."""
        return notebook_html(self.summary)

    def to_dataframe(self) -> pandas.DataFrame:
        import pandas

        return pandas.DataFrame(self.rows)


def compare(
    data: str = ComparisonConfig.data,
    *,
    out: str | Path | None = None,
    worker_command: Sequence[str] | None = None,
    components: ComponentRegistry | None = None,
    prepare_data: PrepareDataFn | None = None,
    **settings: Any,
) -> Comparison:
    """Compare variants on a corpus; `settings` are the fields of `ComparisonConfig` and `ExecutionConfig`.

    `prepare_data` returns keys of the section `data` of all runs with the tokenizer of its config.

    The runs and `study.yaml` are written to `out`. `qkflow.report.write_outputs(comparison)` adds
    report.html, summary.json and the CSV files.

    >>> comparison = compare("speeches", variants="standard,euler", tokens="200k")   # doctest: +SKIP
    >>> comparison.verdicts["euler"]                                                  # doctest: +SKIP
    """
    execution, settings = ExecutionConfig.split(settings)
    config = ComparisonConfig.parse(data=data, **settings)
    grid, study_dir = plan_study(config, out, components)
    _check_batches(grid, execution.processes_per_run)
    pilot_sd = read_pilot_sd(config.pilot)
    tasks = load_tasks(config)
    if execution.engine == "local":
        resolve_device(config.device)
    prepare = prepare_data or prepare_corpus
    with closing(build_engine(execution, config.device, command=worker_command)) as engine:
        # after the engine: tokenizing takes long, and a cluster that is missing is reported before it
        data_overrides = {each.tokenizer: dict(prepare(each)) for each in _config_per_tokenizer(grid)}
        with study_dir.lock():  # nothing was written before
            engine.check_folder(study_dir.path)
            runner = StudyRunner(grid, study_dir, engine, execution.jobs, data_overrides, pilot_sd)
            runner.run()
    if tasks:
        execution = replace(execution, processes_per_run=1)
        engine = build_engine(execution, config.device, module=FINETUNE_WORKER)
        with closing(engine), study_dir.lock():
            runner.finetune(tasks, engine)
    return replace(load_comparison(study_dir.path), execution_time=runner.execution_time)


def plan_study(
    config: ComparisonConfig, out: str | Path | None = None, components: ComponentRegistry | None = None
) -> tuple[Grid, StudyDir]:
    """Return the grid and the folder of a study; raise InputError if it cannot run there. Writes nothing."""
    grid = build_grid(config, components)
    check_source(config)
    if components is None:  # other components need another worker, which can build them
        check_models(grid)
    study_dir = StudyDir(Path(out) if out else config.default_folder())
    study_dir.check_usable()
    if study_dir.exists:
        earlier = StudyPlan.load(study_dir)
        _check_compatible(config, earlier.config, study_dir)
        if any(run.phase == "compare" and study_dir.run_dir(run.id).is_finished for run in earlier.runs):
            _check_plan_is_kept(grid, earlier, study_dir)
    return grid, study_dir


def load_comparison(folder: str | Path) -> Comparison:
    """Analyze the runs in a study's folder, which may still be running, or in its record (a JSON file)."""
    plan, runs = _load_plan_and_runs(Path(folder))
    return Comparison(Path(folder), analyze(plan, runs), runs)


def save_record(folder: str | Path, path: Path) -> None:
    """Write the study in `folder` as a record, one JSON file that `load_comparison` reads."""
    write_record(*_load_plan_and_runs(Path(folder)), path)


def restore_record(path: str | Path, folder: str | Path) -> None:
    """Write the finished runs of a record into `folder`, so that `compare(out=folder)` does not repeat them.

    A folder that holds a study already is left as it is. A record has no weights: the restored runs cannot be
    fine-tuned or probed.
    """
    study_dir = StudyDir(Path(folder))
    study_dir.check_usable()
    if study_dir.exists:
        return
    plan, runs = read_record(Path(path))
    with study_dir.lock():
        restore_runs(plan, runs, study_dir)


def _load_plan_and_runs(folder: Path) -> tuple[StudyPlan, list[RunData]]:
    if folder.is_file():
        return read_record(folder)
    study_dir = StudyDir(folder)
    plan = StudyPlan.load(study_dir)
    return plan, load_runs(study_dir, plan)


def read_pilot_sd(folder: str | None) -> float | None:
    """Return the standard deviation of paired differences in a pilot study; None without one."""
    if folder is None:
        return None
    power = analyze(*_load_plan_and_runs(Path(folder))).power
    if power is None or power.sd is None:
        raise InputError(
            f"--pilot {folder} has no judged pairs of runs to take the noise from: use a finished comparison "
            "with verdicts",
            code="pilot-without-noise",
        )
    return power.sd


def prepare_corpus(config: ComparisonConfig) -> dict[str, Any]:
    """Tokenize the corpus once for all workers; return its fingerprint, a part of the config of every run."""
    tokens = prepare(config.data, config.tokenizer)
    # both raise InputError if the corpus is too short
    TrainWindows(tokens.tokens("train"), config.seq_len, config.batch_size, seed=0)
    EvalWindows(tokens.tokens("validation"), config.seq_len, config.batch_size)
    return {"fingerprint": tokens.fingerprint}


def _config_per_tokenizer(grid: Grid) -> list[ComparisonConfig]:
    """Return the config once per tokenizer, with the longest windows and largest batch of its cells."""
    by_tokenizer: dict[str, list[Cell]] = {}
    for cell in grid.one_cell_per_model():
        by_tokenizer.setdefault(cell.tokenizer(grid.config), []).append(cell)
    configs = []
    for tokenizer, cells in by_tokenizer.items():
        largest = max(cells, key=lambda cell: cell.tokens_per_step(grid.config))
        seq_len = max(cell.seq_len(grid.config) for cell in cells)
        batch_size = math.ceil(largest.tokens_per_step(grid.config) / seq_len)
        configs.append(replace(grid.config, tokenizer=tokenizer, seq_len=seq_len, batch_size=batch_size))
    return configs


def _check_batches(grid: Grid, processes: int) -> None:
    """Raise InputError if the processes of a run cannot share its batch."""
    for cell in grid.cells:
        batch_size = int(cell.variant.override("train.batch_size", grid.config.batch_size))
        accumulate = int(cell.variant.override("train.accumulate", grid.config.accumulate))
        if batch_size % (accumulate * processes):
            raise InputError(
                f"{cell.name}: a batch of {batch_size} windows is not a multiple of --processes-per-run "
                f"{processes} × --accumulate {accumulate}",
                code="batch-not-divisible",
            )


def _check_compatible(config: ComparisonConfig, earlier: ComparisonConfig, study_dir: StudyDir) -> None:
    for name in _FIXED_PER_STUDY:
        before, now = getattr(earlier, name), getattr(config, name)
        if before != now:
            raise InputError(
                f"{study_dir.path} holds a comparison with {name} {before}, not {now}: use another --out",
                code="other-study",
            )


def _check_plan_is_kept(grid: Grid, earlier: StudyPlan, study_dir: StudyDir) -> None:
    """Raise InputError for a change of the plan after judged runs; only variants may be added."""
    change = next(_plan_changes(grid, earlier), None)
    if change is not None:
        raise InputError(
            f"{study_dir.path} has results, and {change}: a plan that changes after a look at the results "
            "makes false verdicts more frequent. Use another --out; --seeds auto adds seeds as needed",
            code="plan-fixed",
        )


def _plan_changes(grid: Grid, earlier: StudyPlan) -> Iterator[str]:
    for name in _FIXED_BY_RESULTS:
        before, now = getattr(earlier.config, name), getattr(grid.config, name)
        if before != now:
            yield f"--{name.replace('_', '-')} was {before}, not {now}"
    cells = {_arm_key(arm): {cell.name for cell in arm.cells} for arm in (a.plan() for a in grid.arms)}
    for arm in earlier.arms:
        before_cells, now_cells = {cell.name for cell in arm.cells}, cells.get(_arm_key(arm), set())
        subject = "the pool of baselines" if arm.role == "reference" else arm.name
        if added := sorted(now_cells - before_cells):
            yield f"{subject} would get {join_limited(added)}"
        if removed := sorted(before_cells - now_cells):
            yield f"{subject} would lose {join_limited(removed)}"


def _arm_key(arm: PlannedArm) -> str:
    return "" if arm.role == "reference" else arm.name
