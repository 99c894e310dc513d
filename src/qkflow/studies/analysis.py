"""From the runs of a study to its summary: best inits, paired differences, costs, verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from qkflow.measures.language import perplexity
from qkflow.studies import sentences, verdicts
from qkflow.studies.blocked import blocked_differences
from qkflow.studies.config import ComparisonConfig
from qkflow.studies.design import SeedDesign, Verdict
from qkflow.studies.finetune.analysis import summarize_tasks
from qkflow.studies.grid import NOISE_FLOOR_SEED
from qkflow.studies.plan import Metric, PlannedArm, StudyPlan
from qkflow.studies.power import detectable_effect, pooled_sd
from qkflow.studies.results import (
    AddedArm,
    ArmSummary,
    Cost,
    FailedRun,
    InitSummary,
    LrSearch,
    LrTrial,
    NoiseFloor,
    Power,
    RunCounts,
    StudySummary,
)
from qkflow.studies.run_data import RunData, mean_finite, model_name, model_throughputs
from qkflow.studies.screening import CellData, Screening, paired_losses, screen
from qkflow.studies.stats import first_crossing, mean_curve, paired_difference, variance_ratio

JUDGED_PHASES = ("screen", "compare", "noise")


def analyze(plan: StudyPlan, runs: Sequence[RunData], pilot_sd: float | None = None) -> StudySummary:
    """Summarize a study: the best init of every arm, paired differences, costs and verdicts.

    `pilot_sd` is the standard deviation of paired differences in another study, for the power before the
    first run.
    """
    config, design, metric = plan.config, plan.config.seed_design(), plan.metric
    judged = [run for run in runs if run.phase == "compare"]
    cells_by_arm = [_cell_data(arm, runs, metric) for arm in plan.arms]
    cells_by_name = {cell.name: cell for cells in cells_by_arm for cell in cells}
    runs_by_cell: dict[str, dict[int, RunData]] = {}
    for run in judged:
        if run.loss is not None:
            runs_by_cell.setdefault(run.cell, {})[run.seed] = run
    pool = screen(cells_by_arm[0])
    speeds = model_throughputs(judged)
    arms, races = [], {}
    for arm, cells in zip(plan.arms, cells_by_arm, strict=True):
        screening = races[arm.name] = screen(cells)
        leader_runs = runs_by_cell.get(screening.leader.name, {})
        result = _arm_summary(arm, cells, screening, cells_by_name, leader_runs, design)
        if arm.role != "reference":
            reference_runs = runs_by_cell.get(pool.leader.name, {})
            result = _compare_to_reference(result, screening, pool, config)
            result = _cost_to_target(result, leader_runs, reference_runs, speeds, metric)
        arms.append(result)
    if not design.looks:
        arms = _with_blocked(arms, config.confidence)
    first, *variants = verdicts.judge(arms, races, pool, config, metric)
    summary = StudySummary(
        config=config,
        command=plan.command,
        reference=first if pool.leader.judged else None,
        variants=tuple(variants),
        runs=_count_runs([run for run in runs if run.phase in JUDGED_PHASES]),
        metric=metric,
        noise_floor=_noise_floor(pool.leader, runs, metric, design),
        power=_power(variants, config, design, pilot_sd),
        planned_at=plan.created_at,
        added_arms=tuple(
            AddedArm(arm.name, arm.added_at, arm.runs_before) for arm in plan.arms if arm.runs_before
        ),
        learning_rates=_lr_searches(runs),
        environment=_merge_environments(judged),
        finetune=summarize_tasks(config, runs, [first, *variants]),
    )
    return replace(summary, notes=tuple(_notes(summary)), headline=sentences.headline(summary))


def screen_arms(plan: StudyPlan, runs: Sequence[RunData]) -> list[Screening]:
    """Return the leader and the cells in the race of every arm, the pool of baselines first."""
    return [screen(_cell_data(arm, runs, plan.metric)) for arm in plan.arms]


def _cell_data(arm: PlannedArm, runs: Sequence[RunData], metric: Metric) -> list[CellData]:
    cells = []
    for planned in arm.cells:
        own = [run for run in runs if run.cell == planned.name]
        scores = [(run.phase, run.seed, run.score(metric)) for run in own]
        screened, judged = (
            {seed: score for at, seed, score in scores if at == phase and score is not None}
            for phase in ("screen", "compare")
        )
        shown = [run for run in own if run.phase == ("screen" if screened else "compare")]
        cells.append(
            CellData(
                planned.name,
                planned.init,
                planned.same_init_baseline,
                planned.variant,
                lr=next((run.lr for run in own if run.phase in ("screen", "compare")), None),
                screened=screened,
                judged=judged,
                failed={run.seed for run in own if run.phase == "compare" and run.status == "failed"},
                loss=mean_finite([run.loss for run in shown]),
            )
        )
    return cells


def _arm_summary(
    arm: PlannedArm,
    cells: Sequence[CellData],
    screening: Screening,
    cells_by_name: Mapping[str, CellData],
    runs: Mapping[int, RunData],
    design: SeedDesign,
) -> ArmSummary:
    """Summarize an arm on its own, without the reference."""
    leader = screening.leader
    finished = [runs[seed] for seed in sorted(runs)]
    results = [run.result or {} for run in finished]
    loss = mean_finite([run.loss for run in finished])
    per_token = mean_finite([result.get("flops_per_token") for result in results])
    tokens = mean_finite([result.get("tokens") for result in results])
    cost = Cost(
        tokens=tokens,
        flops=None if per_token is None or tokens is None else per_token * tokens,
        seconds=mean_finite([result.get("seconds") for result in results]),
        step_seconds=mean_finite([result.get("step_seconds") for result in results]),
        peak_memory_bytes=max((r.get("peak_memory_bytes") or 0 for r in results), default=0) or None,
        parameters=results[0].get("parameters") if results else None,
    )
    return ArmSummary(
        variant=leader.variant if arm.role == "reference" and leader.variant else arm.name,
        role=arm.role,
        best_init=leader.init,
        cell=leader.name,
        seeds=tuple(sorted(leader.judged)),
        lr=finished[0].lr if finished else None,
        loss=loss,
        loss_by_seed=tuple(leader.judged[seed] for seed in sorted(leader.judged)),
        failed_seeds=tuple(sorted(leader.failed)),
        perplexity=None if loss is None else perplexity(loss),
        bits_per_byte=mean_finite([result.get("bits_per_byte") for result in results]),
        cost=cost,
        by_init=tuple(
            _init_summary(cell, cells_by_name.get(cell.same_init_baseline), cell in screening.racing, design)
            for cell in cells
        ),
    )


def _init_summary(
    cell: CellData, baseline: CellData | None, in_race: bool, design: SeedDesign
) -> InitSummary:
    """Summarize one init on its screening seeds (else judged ones), against its baseline of the same init."""
    difference = None
    if baseline is not None and baseline.name != cell.name:
        both_screened = cell.screened and baseline.screened
        pair = paired_losses(
            *((each.screened if both_screened else each.judged) for each in (cell, baseline))
        )
        difference = paired_difference(*pair, design.confidence) if pair[0] else None
    return InitSummary(
        init=cell.init,
        cell=cell.name,
        against=cell.same_init_baseline,
        seeds=tuple(sorted(cell.screened or cell.judged)),
        lr=cell.lr,
        loss=cell.loss,
        perplexity=None if cell.loss is None else perplexity(cell.loss),
        same_init_difference=difference,
        in_race=in_race,
    )


def _compare_to_reference(
    arm: ArmSummary, screening: Screening, pool: Screening, config: ComparisonConfig
) -> ArmSummary:
    """Add the difference to the reference. A fixed design has no p-value before all its runs have ended."""
    design = config.seed_design()
    difference = screening.difference(pool, design)
    if difference is None:
        return arm
    has_ended = screening.has_ended(config.n_seeds) and pool.has_ended(config.n_seeds)
    if not design.looks and not has_ended:
        difference = replace(difference, p=None, p_equivalent=None)
    pair = paired_losses(screening.leader.judged, pool.leader.judged)
    return replace(arm, difference=difference, seed_variance_ratio=variance_ratio(*pair, design.confidence))


def _cost_to_target(
    arm: ArmSummary,
    runs: Mapping[int, RunData],
    reference_runs: Mapping[int, RunData],
    throughputs: Mapping[str, float],
    metric: Metric,
) -> ArmSummary:
    """Add the cost of reaching the reference's final loss, from the mean curves of common seeds.

    Losses per token of different tokenizers cannot be compared, so bits per byte have no such target.
    """
    seeds = sorted(runs.keys() & reference_runs.keys())
    if not seeds:
        return arm
    curve = mean_curve([runs[seed].curve() for seed in seeds])
    reference_curve = mean_curve([reference_runs[seed].curve() for seed in seeds])
    tokens = _relative_tokens_to_target(curve, reference_curve) if metric == "perplexity" else None
    models = (model_name(each[seeds[0]].cell) for each in (runs, reference_runs))
    speed, reference_speed = (throughputs.get(model) for model in models)
    ratio = reference_speed / speed if speed and reference_speed else None
    cost = replace(
        arm.cost,
        tokens_to_target=tokens,
        seconds_to_target=None if tokens is None or ratio is None else tokens * ratio,
        step_time_ratio=ratio,
    )
    return replace(arm, cost=cost)


def _relative_tokens_to_target(
    curve: Sequence[tuple[float, ...]], reference_curve: Sequence[tuple[float, ...]]
) -> float | None:
    """Return the tokens after which a curve reaches the end of the reference's, relative to its tokens.

    The target is a point of the curve: the final loss is measured on more tokens than the curve.
    """
    if not reference_curve:
        return None
    _, budget, _, target = reference_curve[-1]
    reached = first_crossing([row[1] for row in curve], [row[3] for row in curve], target)
    return reached / budget if reached is not None and budget > 0 else None


def _with_blocked(arms: Sequence[ArmSummary], confidence: float) -> list[ArmSummary]:
    """Add the blocked analysis, over the seeds that all arms with runs have."""
    included = [i for i, arm in enumerate(arms) if arm.seeds and (i == 0 or arm.cell != arms[0].cell)]
    result = list(arms)
    if 0 not in included or len(included) < 2:
        return result
    seeds = sorted(set.intersection(*(set(arms[i].seeds) for i in included)))
    losses = [[arms[i].losses[seed] for seed in seeds] for i in included]
    blocked = blocked_differences(losses, [arms[i].best_init for i in included], confidence)
    for i, difference in zip(included[1:], blocked, strict=True):
        result[i] = replace(arms[i], blocked=difference)
    return result


def _noise_floor(
    reference: CellData, runs: Sequence[RunData], metric: Metric, design: SeedDesign
) -> NoiseFloor | None:
    """Return the reference against its A/A runs, in the order of their seeds."""
    repeats = {
        run.seed: score
        for run in runs
        if run.phase == "noise" and run.cell == reference.name and (score := run.score(metric)) is not None
    }
    shifted = {seed - NOISE_FLOOR_SEED: score for seed, score in repeats.items()}
    pair = paired_losses(shifted, reference.judged)
    if not pair[0]:
        return None
    return NoiseFloor(reference.name, paired_difference(*pair, design.confidence))


def _power(
    arms: Sequence[ArmSummary], config: ComparisonConfig, design: SeedDesign, pilot_sd: float | None
) -> Power | None:
    if not config.verdict:
        return None
    tested = [arm for arm in arms if arm.verdict != Verdict.REFERENCE]
    sds = [arm.difference.sd for arm in tested if arm.difference and arm.difference.sd]
    seeds = max(design.looks, default=config.n_seeds)
    sd, source = (pooled_sd(sds), "this study") if sds else (pilot_sd, "the pilot study")
    effect = detectable_effect(design, seeds, len(tested))
    return Power(seeds, len(tested), effect, sd, source if sd is not None else "not known yet")


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
