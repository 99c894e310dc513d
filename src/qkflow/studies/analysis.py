"""From the runs of a study to its summary: best inits, paired differences, costs, verdicts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from qkflow.measures.language import perplexity
from qkflow.studies import verdicts
from qkflow.studies.finetune.analysis import summarize_tasks
from qkflow.studies.plan import PlannedArm, StudyPlan
from qkflow.studies.results import (
    ArmSummary,
    ChoiceOfInit,
    Cost,
    FailedRun,
    InitSummary,
    LrSearch,
    LrTrial,
    RunCounts,
    StudySummary,
)
from qkflow.studies.runner.study_dir import StudyDir
from qkflow.studies.stats import (
    PairedDifference,
    first_crossing,
    mean_curve,
    paired_difference,
    perplexity_percent_change,
    variance_ratio,
)

THROUGHPUT_QUANTILE = 0.9  # of the logged tokens per second of a run


@dataclass(frozen=True)
class RunData:
    """One run as read from its folder."""

    id: str
    phase: str
    cell: str
    seed: int
    lr: float
    tokens: int
    result: dict[str, Any] | None
    metrics: dict[str, list[dict[str, Any]]]
    last_log_line: str = ""

    @property
    def loss(self) -> float | None:
        """The final validation loss; None unless the run finished with a finite one."""
        if self.result is None or self.result.get("status") != "finished":
            return None
        return _finite_or_none(self.result.get("loss"))

    @property
    def status(self) -> str:
        if self.result is None:
            return "not finished"
        return "finished" if self.loss is not None else "failed"

    @property
    def error(self) -> str:
        return str((self.result or {}).get("error") or self.last_log_line or "no finite loss")

    def throughput(self) -> float | None:
        """Return tokens per second, as a high quantile: pauses and a shared CPU core must not count."""
        rows = self.metrics.get("train", [])
        speeds = [speed for row in rows if (speed := _finite_or_none(row.get("tokens_per_second")))]
        return float(np.quantile(speeds, THROUGHPUT_QUANTILE)) if speeds else None

    def curve(self) -> list[tuple[float, float, float, float]]:
        """Return (step, tokens, seconds, loss) of every evaluation; seconds follow from `throughput`."""
        speed = self.throughput()
        rows = []
        for row in self.metrics.get("eval", []):
            step, *values = (_finite_or_none(row.get(name)) for name in ("step", "tokens", "seconds", "loss"))
            tokens, seconds, loss = values
            if step is not None and tokens is not None and seconds is not None and loss is not None:
                rows.append((step, tokens, tokens / speed if speed else seconds, loss))
        return rows


def load_runs(study_dir: StudyDir, plan: StudyPlan) -> list[RunData]:
    """Read every planned run; metrics only of the runs that are compared."""
    runs = []
    for planned in plan.runs:
        run = study_dir.run_dir(planned.id)
        metrics = run.metrics() if planned.phase == "compare" else {}
        runs.append(
            RunData(
                **asdict(planned), result=run.result(), metrics=metrics, last_log_line=run.last_log_line()
            )
        )
    return runs


@dataclass
class CellData:
    """The finished runs of one cell, by seed."""

    name: str
    init: str
    same_init_baseline: str
    runs: dict[int, RunData] = field(default_factory=dict)

    def losses(self, seeds: Iterable[int]) -> list[float]:
        return [loss for seed in seeds if (loss := self.runs[seed].loss) is not None]

    def sort_key(self, seeds: Iterable[int] | None = None) -> tuple[int, float]:
        """Key to minimize: a cell with diverged seeds never ranks above one without."""
        losses = self.losses(self.runs if seeds is None else [s for s in seeds if s in self.runs])
        return -len(losses), float(np.mean(losses)) if losses else math.inf


def best_cell(cells: Sequence[CellData], seeds: Iterable[int] | None = None) -> CellData:
    """Return the cell with the lowest mean final loss over `seeds` (default: all)."""
    chosen = None if seeds is None else list(seeds)
    return min(cells, key=lambda cell: cell.sort_key(chosen))


def common_seeds(a: CellData, b: CellData) -> list[int]:
    return sorted(a.runs.keys() & b.runs.keys())


def model_throughputs(runs: Iterable[RunData]) -> dict[str, float]:
    """Return tokens per second by model, of its fastest run: init and seed do not change the speed."""
    speeds: dict[str, float] = {}
    for run in runs:
        model = _model_name(run.cell)
        speeds[model] = max(speeds.get(model, 0.0), run.throughput() or 0.0)
    return {model: speed for model, speed in speeds.items() if speed}


def _model_name(cell: str) -> str:
    """Return the part of a cell's name before its init."""
    return cell.partition("@")[0]


def analyze(plan: StudyPlan, runs: Sequence[RunData]) -> StudySummary:
    """Summarize a study: the best init of every arm, paired differences, costs and verdicts."""
    config, compared = plan.config, [run for run in runs if run.phase == "compare"]
    cells_by_arm = [_cell_data(arm, compared) for arm in plan.arms]
    cells_by_name = {cell.name: cell for cells in cells_by_arm for cell in cells}
    standard = cells_by_arm[0]
    reference = best_cell(standard)
    speeds = model_throughputs(compared)
    arms = []
    for arm, cells in zip(plan.arms, cells_by_arm, strict=True):
        result = _arm_summary(arm, cells, cells_by_name, config.confidence)
        if arm.role != "reference":
            result = _compare_to_reference(result, best_cell(cells), reference, speeds, config.confidence)
            result = replace(result, choice_of_init=_choice_of_init(cells, standard))
        arms.append(result)
    first, *variants = verdicts.judge(arms, config)
    summary = StudySummary(
        config=config,
        command=plan.command,
        reference=first if reference.runs else None,
        variants=tuple(variants),
        runs=_count_runs(compared),
        learning_rates=_lr_searches(runs),
        environment=_merge_environments(compared),
        finetune=summarize_tasks(config, runs, [first, *variants]),
    )
    return replace(summary, notes=tuple(_notes(summary)), headline=verdicts.headline(summary))


def _cell_data(arm: PlannedArm, runs: Sequence[RunData]) -> list[CellData]:
    cells = []
    for cell in arm.cells:
        finished = {run.seed: run for run in runs if run.cell == cell.name and run.loss is not None}
        cells.append(CellData(cell.name, cell.init, cell.same_init_baseline, finished))
    return cells


def _arm_summary(
    arm: PlannedArm, cells: Sequence[CellData], cells_by_name: Mapping[str, CellData], confidence: float
) -> ArmSummary:
    """Summarize an arm on its own, without the reference."""
    best = best_cell(cells)
    finished = [best.runs[seed] for seed in sorted(best.runs)]
    results = [run.result or {} for run in finished]
    loss = _mean_finite([run.loss for run in finished])
    per_token = _mean_finite([result.get("flops_per_token") for result in results])
    tokens = _mean_finite([result.get("tokens") for result in results])
    cost = Cost(
        tokens=tokens,
        flops=None if per_token is None or tokens is None else per_token * tokens,
        seconds=_mean_finite([result.get("seconds") for result in results]),
        step_seconds=_mean_finite([result.get("step_seconds") for result in results]),
        peak_memory_bytes=max((r.get("peak_memory_bytes") or 0 for r in results), default=0) or None,
        parameters=results[0].get("parameters") if results else None,
    )
    return ArmSummary(
        variant=arm.name,
        role=arm.role,
        best_init=best.init,
        cell=best.name,
        seeds=tuple(run.seed for run in finished),
        lr=finished[0].lr if finished else None,
        loss=loss,
        loss_by_seed=tuple(best.losses(sorted(best.runs))),
        perplexity=None if loss is None else perplexity(loss),
        bits_per_byte=_mean_finite([result.get("bits_per_byte") for result in results]),
        cost=cost,
        by_init=tuple(
            _init_summary(cell, cells_by_name.get(cell.same_init_baseline), confidence) for cell in cells
        ),
    )


def _init_summary(cell: CellData, baseline: CellData | None, confidence: float) -> InitSummary:
    """Summarize one init, with the paired difference to the standard model of the same init."""
    loss = _mean_finite([run.loss for run in cell.runs.values()])
    difference = None
    if baseline is not None and baseline.name != cell.name:
        difference = _difference(cell, baseline, confidence)
    return InitSummary(
        init=cell.init,
        cell=cell.name,
        against=cell.same_init_baseline,
        seeds=tuple(sorted(cell.runs)),
        lr=next((run.lr for run in cell.runs.values()), None),
        loss=loss,
        perplexity=None if loss is None else perplexity(loss),
        same_init_difference=difference,
    )


def _difference(cell: CellData, reference: CellData, confidence: float) -> PairedDifference | None:
    seeds = common_seeds(cell, reference)
    return paired_difference(cell.losses(seeds), reference.losses(seeds), confidence) if seeds else None


def _compare_to_reference(
    arm: ArmSummary, cell: CellData, reference: CellData, throughputs: Mapping[str, float], confidence: float
) -> ArmSummary:
    """Add the paired difference, the variance ratio, and the cost of reaching the reference's final loss."""
    seeds = common_seeds(cell, reference)
    if not seeds:
        return arm
    target = float(np.mean(reference.losses(seeds)))
    curve = mean_curve([cell.runs[seed].curve() for seed in seeds])
    reference_curve = mean_curve([reference.runs[seed].curve() for seed in seeds])
    reached = first_crossing([row[1] for row in curve], [row[3] for row in curve], target)
    budget = reference_curve[-1][1] if reference_curve else 0
    tokens = reached / budget if reached is not None and budget > 0 else None
    speed, reference_speed = (throughputs.get(_model_name(each.name)) for each in (cell, reference))
    ratio = reference_speed / speed if speed and reference_speed else None
    cost = replace(
        arm.cost,
        tokens_to_target=tokens,
        seconds_to_target=None if tokens is None or ratio is None else tokens * ratio,
        step_time_ratio=ratio,
    )
    return replace(
        arm,
        cost=cost,
        difference=_difference(cell, reference, confidence),
        seed_variance_ratio=variance_ratio(cell.losses(seeds), reference.losses(seeds), confidence),
    )


def _choice_of_init(cells: Sequence[CellData], standard: Sequence[CellData]) -> ChoiceOfInit | None:
    """Return the mean difference with the inits of each seed chosen on the *other* seeds.

    The best init is chosen on the same seeds that the variant is judged by, which favors it a little. Where
    the leave-one-out choice is the same for every seed, it does not.
    """
    all_cells = [*cells, *standard]
    seeds = sorted(set.intersection(*(set(cell.runs) for cell in all_cells))) if all_cells else []
    if len(seeds) < 2:
        return None
    losses, base_losses, choices = [], [], set()
    for seed in seeds:
        others = [s for s in seeds if s != seed]
        pick, base = best_cell(cells, others), best_cell(standard, others)
        losses += pick.losses([seed])
        base_losses += base.losses([seed])
        choices.add((pick.name, base.name))
    mean = float((np.asarray(losses) - np.asarray(base_losses)).mean())
    return ChoiceOfInit(len(choices) == 1, mean, perplexity_percent_change(mean))


def _count_runs(runs: Sequence[RunData]) -> RunCounts:
    failed = tuple(FailedRun(run.id, run.cell, run.seed, run.error) for run in runs if run.status == "failed")
    return RunCounts(len(runs), sum(run.status == "finished" for run in runs), failed)


def _lr_searches(runs: Sequence[RunData]) -> tuple[LrSearch, ...]:
    loss_by_lr: dict[str, dict[float, float | None]] = {}
    for run in runs:
        if run.phase == "tune":
            loss_by_lr.setdefault(run.cell, {})[run.lr] = run.loss
    searches = []
    for cell, tried in loss_by_lr.items():
        chosen = best_lr(tried)
        at_edge = chosen is not None and len(tried) > 1 and chosen in (min(tried), max(tried))
        trials = tuple(LrTrial(lr, tried[lr]) for lr in sorted(tried))
        searches.append(LrSearch(cell, chosen, at_edge, trials))
    return tuple(searches)


def best_lr(loss_by_lr: Mapping[float, float | None]) -> float | None:
    """Return the learning rate with the lowest loss; runs that diverged (None) do not count."""
    finite = {lr: loss for lr, loss in loss_by_lr.items() if loss is not None}
    return min(finite, key=lambda lr: finite[lr]) if finite else None


def _merge_environments(runs: Sequence[RunData]) -> dict[str, Any]:
    """Merge the environments of all runs: one value, or the list of values where runs differ."""
    seen: dict[str, list[Any]] = {}
    for run in runs:
        for name, value in ((run.result or {}).get("environment") or {}).items():
            values = seen.setdefault(name, [])
            if value not in values:
                values.append(value)
    return {name: values[0] if len(values) == 1 else values for name, values in seen.items()}


def _notes(summary: StudySummary) -> list[str]:
    """Return the caveats a reader needs before trusting the numbers."""
    notes, runs = [], summary.runs
    left = runs.planned - runs.finished - len(runs.failed)
    if left:
        notes.append(f"This is not complete: {left} of {runs.planned} runs have not finished.")
    errors: dict[str, list[str]] = {}
    for run in runs.failed:
        errors.setdefault(run.error, []).append(f"{run.cell} seed {run.seed}")
    notes += [f"Failed: {', '.join(names)}: {error}" for error, names in errors.items()]
    choices = {arm.variant: arm.choice_of_init for arm in summary.variants}
    unstable = [name for name, choice in choices.items() if choice and not choice.stable]
    if unstable:
        notes.append(
            f"Which init is best depends on the seeds for {', '.join(unstable)} or the reference; "
            "choice_of_init is the mean difference with inits chosen on the other seeds."
        )
    edges = [search.cell for search in summary.learning_rates if search.at_edge]
    if edges:
        notes.append(f"The best learning rate is at the edge of the grid for {', '.join(edges)}: widen it.")
    if isinstance(summary.commit, list):
        notes.append("The runs were made by different commits of the code.")
    pairs = [arm.difference.pairs for arm in summary.variants if arm.difference]
    if pairs and 1 < min(pairs) < 6:
        notes.append(
            f"With {min(pairs)} seeds the t-interval assumes that differences are about normal, and the "
            "bootstrap has little to resample: it tends to be too narrow."
        )
    return notes


def _mean_finite(values: Iterable[float | None]) -> float | None:
    finite = [number for value in values if (number := _finite_or_none(value)) is not None]
    return float(np.mean(finite)) if finite else None


def _finite_or_none(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
