"""Analysis of a pace study: means over seeds, paired differences to r = 1, verdicts.

Runs of one seed share the init of every parameter and the order of every batch, so each ratio is judged by
its paired differences to the baseline. Holm's correction is over the ratios, for each measure separately.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from qkflow.studies.pace.config import BASELINE_RATIO, PaceStudyConfig
from qkflow.studies.pace.plan import PacePlan
from qkflow.studies.pace.recipes import PUBLISHED_RESULTS, get_recipe
from qkflow.studies.pace.results import (
    ATTRIBUTION_METHODS,
    AttributionContrasts,
    CurvePoint,
    FailedRun,
    MeasureSummary,
    PaceSummary,
    RatioSummary,
    RunCounts,
    RunResult,
    StudyFacts,
    Verdict,
)
from qkflow.studies.results import CorrectedDifference
from qkflow.studies.results import Verdict as LossVerdict
from qkflow.studies.runner.study_dir import STUDY_FILE, StudyDir
from qkflow.studies.sentences import format_p_value
from qkflow.studies.stats import MIN_SEEDS_FOR_VERDICT, paired_difference
from qkflow.studies.verdicts import correct_family, decide_verdict
from qkflow.training.run_dir import RESULT_FILE

ResultsBySeed = Mapping[int, RunResult]


@dataclass(frozen=True)
class Measure:
    title: str
    read: Callable[[RunResult], float | None]


MEASURES = {
    "performance": Measure("test performance", lambda run: run.performance),
    "mass": Measure("attention on the rationale", lambda run: run.mass),
    "confidence": Measure("attention confidence (AC)", lambda run: run.confidence),
    "comprehensiveness": Measure(
        "comprehensiveness (rollout)", lambda run: run.at_smallest_k("comprehensiveness", "rollout")
    ),
    "sufficiency": Measure("sufficiency (rollout)", lambda run: run.at_smallest_k("sufficiency", "rollout")),
    "attention_over_random": Measure(
        "comprehensiveness of attention over random",
        lambda run: run.aopc("comprehensiveness", "attention") - run.aopc("comprehensiveness", "random"),
    ),
    "qk_scale": Measure("query-key scale ‖W_QK‖", lambda run: run.circuits.get("qk_scale")),
    "ov_scale": Measure("output-value scale ‖W_OV‖", lambda run: run.circuits.get("ov_scale")),
    "loss": Measure("test loss", lambda run: run.loss),
}
SENTENCE_MEASURES = ("mass", "confidence", "comprehensiveness", "attention_over_random", "performance")
HEADLINE_MEASURES = ("mass", "comprehensiveness", "performance")
CONTRASTS = (
    ("attention", "random"),
    ("rollout", "random"),
    ("gradient", "random"),
    ("attention", "gradient"),
)
_DIRECTIONS: dict[LossVerdict, Verdict] = {
    LossVerdict.HELPS: "lowers",
    LossVerdict.HURTS: "raises",
    LossVerdict.UNDECIDED: "no evidence",
    LossVerdict.NO_VERDICT: "no verdict",
}
MIN_GAIN_OVER_MAJORITY = 0.03  # accuracy; a baseline below it has learned little


def analyze(study_dir: StudyDir, study: dict[str, Any]) -> PaceSummary:
    """Return the summary of the finished runs. `study` is the content of study.yaml."""
    plan = PacePlan.from_dict(study, study_dir.path / STUDY_FILE)
    config, facts, ratios = plan.config, plan.facts, list(plan.arms)
    baseline = BASELINE_RATIO if BASELINE_RATIO in ratios else ratios[0]
    results = _load_results(study_dir, plan)
    rows = _summarize_ratios(ratios, results, baseline, config.confidence)
    n_finished = sum(len(by_seed) for by_seed in results.values())
    counts = RunCounts(len(plan.runs), n_finished, _failed_runs(study_dir, plan))
    return PaceSummary(
        config=config,
        command=plan.command,
        recipe=plan.recipe,
        facts=facts,
        baseline=baseline,
        rows=rows,
        explains=[
            attribution_contrasts(ratio, results[ratio], config.confidence)
            for ratio in ratios
            if ratio in results
        ],
        published=PUBLISHED_RESULTS.get(config.task),
        runs=counts,
        curves=_metric_curves(study_dir, plan),
        environment=_first_environment(results),
        headline=_headline(config, rows),
        notes=_notes(config, facts, rows, baseline, counts),
    )


def _load_results(study_dir: StudyDir, plan: PacePlan) -> dict[str, dict[int, RunResult]]:
    """Return the finished results by ratio and seed."""
    results: dict[str, dict[int, RunResult]] = {}
    for run in plan.runs:
        run_dir = study_dir.run_dir(run.id)
        result = run_dir.result()
        if result and result.get("status") == "finished":
            by_seed = results.setdefault(run.cell.removeprefix("r="), {})
            by_seed[run.seed] = RunResult.from_dict(result, run_dir.path / RESULT_FILE)
    return results


def _failed_runs(study_dir: StudyDir, plan: PacePlan) -> list[FailedRun]:
    return [
        FailedRun(run.cell, run.seed, result.get("error"))
        for run in plan.runs
        if (result := study_dir.run_dir(run.id).result()) and result.get("status") == "failed"
    ]


def _summarize_ratios(
    ratios: list[str], results: Mapping[str, ResultsBySeed], baseline: str, confidence: float
) -> list[RatioSummary]:
    measures: dict[str, dict[str, MeasureSummary]] = {ratio: {} for ratio in ratios}
    for name, measure in MEASURES.items():
        for ratio, entry in _summarize_measure(measure, results, baseline, confidence).items():
            measures[ratio][name] = entry
    return [
        _summarize_ratio(ratio, results.get(ratio, {}), measures[ratio], baseline, confidence)
        for ratio in ratios
    ]


def _summarize_measure(
    measure: Measure, results: Mapping[str, ResultsBySeed], baseline: str, confidence: float
) -> dict[str, MeasureSummary]:
    """Return ratio → summary of one measure, with Holm's correction; ratios without values are left out."""
    values: dict[str, dict[int, float]] = {}
    for ratio, runs in results.items():
        by_seed = {seed: value for seed in sorted(runs) if (value := measure.read(runs[seed])) is not None}
        if by_seed:
            values[ratio] = by_seed
    base = values.get(baseline, {})
    differences = {
        ratio: paired_difference(
            [by_seed[seed] for seed in paired], [base[seed] for seed in paired], confidence
        )
        for ratio, by_seed in values.items()
        if ratio != baseline and (paired := [seed for seed in by_seed if seed in base])
    }
    corrected = correct_family(differences)
    return {
        ratio: MeasureSummary(
            fmean(by_seed.values()),
            list(by_seed.values()),
            corrected.get(ratio),
            _verdict(corrected[ratio], confidence) if ratio in corrected else None,
        )
        for ratio, by_seed in values.items()
    }


def _verdict(difference: CorrectedDifference, confidence: float) -> Verdict:
    """Return the verdict of `qkflow compare` as a direction; there a lower value (of the loss) helps."""
    return _DIRECTIONS[decide_verdict(difference, confidence)]


def _summarize_ratio(
    ratio: str, results: ResultsBySeed, measures: dict[str, MeasureSummary], baseline: str, confidence: float
) -> RatioSummary:
    runs = list(results.values())
    heatmaps = [run.heatmap for run in runs if run.heatmap]
    heatmaps = [each for each in heatmaps if np.shape(each) == np.shape(heatmaps[0])]
    deletions = {
        method: {
            name: fmean(run.aopc(name, method) for run in runs)
            for name in ("comprehensiveness", "sufficiency")
        }
        for method in ATTRIBUTION_METHODS
        if runs
    }
    return RatioSummary(
        ratio=ratio,
        seeds=sorted(results),
        measures=measures,
        heatmap=np.mean(heatmaps, axis=0).tolist() if heatmaps else None,
        deletions=deletions,
        seconds=fmean(run.seconds for run in runs) if runs else None,
        sentences=[
            _sentence(ratio, MEASURES[name].title, measures[name], baseline, confidence)
            for name in SENTENCE_MEASURES
            if name in measures and measures[name].difference
        ],
    )


def attribution_contrasts(ratio: str, results: ResultsBySeed, confidence: float) -> AttributionContrasts:
    """Compare the comprehensiveness (AOPC) of attribution methods, paired by seed.

    A method explains predictions if it is above random. The gradient shows what is attainable.
    """
    runs = [results[seed] for seed in sorted(results)]
    aopc = {method: [run.aopc("comprehensiveness", method) for run in runs] for method in ATTRIBUTION_METHODS}
    return AttributionContrasts(
        ratio, {f"{a}_{b}": paired_difference(aopc[a], aopc[b], confidence) for a, b in CONTRASTS}
    )


def _sentence(ratio: str, title: str, entry: MeasureSummary, baseline: str, confidence: float) -> str:
    difference = entry.difference
    assert difference is not None
    size = f"{difference.mean:+.3f}".replace("-", "−")
    if entry.verdict == "no verdict" or difference.p_holm is None:
        return (
            f"r = {ratio}: no verdict on {title} from {difference.pairs} paired seed(s); difference {size}."
        )
    details = (
        f"{100 * confidence:.3g}% interval {difference.low:+.3f} to {difference.high:+.3f}, "
        f"{difference.pairs} paired seeds, {format_p_value(difference.p_holm)}"
    ).replace("-", "−")
    if entry.verdict == "no evidence":
        return f"r = {ratio}: no evidence of an effect on {title} ({size}; {details})."
    return f"r = {ratio} {entry.verdict} {title} by {size.lstrip('+−')} against r = {baseline} ({details})."


def _headline(config: PaceStudyConfig, rows: list[RatioSummary]) -> str:
    """Summarize the verdicts on the main measures."""
    directions = {"raises": "higher", "lowers": "lower"}
    parts = []
    for name in HEADLINE_MEASURES:
        by_verdict: dict[str, list[str]] = {}
        for row in rows:
            if name in row.measures and (verdict := row.measures[name].verdict):
                by_verdict.setdefault(directions.get(verdict, verdict), []).append(row.ratio)
        if by_verdict:
            verdicts = [f"{verdict} at r = {', '.join(ratios)}" for verdict, ratios in by_verdict.items()]
            parts.append(f"{MEASURES[name].title}: {', '.join(verdicts)}")
    setting = "as published, confounds included" if config.as_published else "single knob"
    if not parts:
        return f"{config.task}, {setting}: nothing to compare yet."
    return f"{config.task}, {setting}. {'; '.join(parts)}."


def _notes(
    config: PaceStudyConfig, facts: StudyFacts, rows: list[RatioSummary], baseline: str, runs: RunCounts
) -> list[str]:
    """Return the caveats that limit what the numbers mean, the most important first."""
    notes = []
    if config.as_published:
        confounds = get_recipe(config.task, True).confounds.describe()
        notes.append(f"as published, r is not the only change: {confounds}; differences have several causes")
    base = next((row for row in rows if row.ratio == baseline), None)
    performance = base.measures.get("performance") if base else None
    majority = facts.majority
    if performance and majority is not None and performance.mean < majority + MIN_GAIN_OVER_MAJORITY:
        notes.append(
            f"the baseline has learned little: its test accuracy is {performance.mean:.1%}, that of always "
            f"predicting the most frequent class {majority:.1%}"
        )
    notes += [f"{count} {issue}" for issue, count in facts.notes.items() if count]
    notes += [f"{failed.ratio} seed {failed.seed} failed: {failed.error}" for failed in runs.failures]
    if config.seeds < MIN_SEEDS_FOR_VERDICT:
        notes.append(f"a verdict needs at least {MIN_SEEDS_FOR_VERDICT} seeds")
    return notes


def _metric_curves(study_dir: StudyDir, plan: PacePlan) -> dict[str, dict[str, list[CurvePoint]]]:
    """Return ratio → metric → points of the evaluations during training."""
    by_ratio: dict[str, dict[str, dict[int, list[float]]]] = {}
    for run in plan.runs:
        metrics = by_ratio.setdefault(run.cell.removeprefix("r="), {})
        for row in study_dir.run_dir(run.id).metrics().get("eval", []):
            for name, value in row.items():
                if isinstance(value, float):
                    metrics.setdefault(name, {}).setdefault(row["step"], []).append(value)
    return {
        ratio: {
            name: [(float(step), fmean(v), min(v), max(v)) for step, v in sorted(by_step.items())]
            for name, by_step in metrics.items()
        }
        for ratio, metrics in by_ratio.items()
        if metrics
    }


def _first_environment(results: Mapping[str, ResultsBySeed]) -> dict[str, Any]:
    first = next((run for by_seed in results.values() for run in by_seed.values()), None)
    return dict(first.environment) if first else {}
