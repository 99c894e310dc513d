"""From fine-tuning runs to verdicts: each variant against the reference, at the cells of language modeling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from qkflow.studies.config import ComparisonConfig
from qkflow.studies.finetune.config import FinetuneTask, parse_tasks
from qkflow.studies.finetune.results import ScoreDifference, TaskArm, TaskSummary
from qkflow.studies.finetune.study import PHASE, finetune_cell
from qkflow.studies.results import ArmSummary, CorrectedDifference, FailedRun, RunCounts, Verdict
from qkflow.studies.stats import paired_difference
from qkflow.studies.verdicts import correct_family, decide_verdict, format_p_value

if TYPE_CHECKING:
    from qkflow.studies.analysis import RunData

METRIC_NAMES = {"accuracy": "accuracy", "mcc": "Matthews correlation", "f1": "F1"}


def summarize_tasks(
    config: ComparisonConfig, runs: Sequence[RunData], arms: Sequence[ArmSummary]
) -> tuple[TaskSummary, ...]:
    """Judge every task of a comparison. The first arm is the reference."""
    finetuned = [run for run in runs if run.phase == PHASE]
    return tuple(_summarize_task(config, task, finetuned, arms) for task in parse_tasks(config.finetune))


def judge_task(scores_by_arm: Mapping[str, Mapping[int, float]], confidence: float) -> list[TaskArm]:
    """Compare the scores by seed of each arm with those of the first, which is the reference.

    The differences are paired by seed, and corrected by Holm's method over all arms of the task. Scores are
    fractions, results are points. Losses are judged elsewhere: minus the score is what gets better downward.
    """
    (reference, base), *others = scores_by_arm.items()
    differences = {}
    for name, scores in others:
        if seeds := sorted(scores.keys() & base.keys()):
            losses, base_losses = ([-100 * each[seed] for seed in seeds] for each in (scores, base))
            difference = paired_difference(losses, base_losses, confidence)
            if difference.mean and difference.low == difference.high:
                # Scores are discrete, so a few seeds may agree by chance: there is no spread to test with.
                difference = replace(difference, p=None)
            differences[name] = difference
    family = correct_family(differences)
    judged = [replace(_task_arm(reference, base), role="reference", verdict=Verdict.REFERENCE)]
    for name, scores in others:
        verdict = decide_verdict(family.get(name), confidence)
        difference = _in_points(family[name]) if name in family else None
        judged.append(replace(_task_arm(name, scores), difference=difference, verdict=verdict))
    return judged


def _task_arm(name: str, scores: Mapping[int, float]) -> TaskArm:
    points = {seed: 100 * scores[seed] for seed in sorted(scores)}
    mean = float(np.mean(list(points.values()))) if points else None
    return TaskArm(name, seeds=tuple(points), score_by_seed=tuple(points.values()), score=mean)


def _in_points(loss: CorrectedDifference) -> ScoreDifference:
    """Return a difference of losses as one of scores: the sign changes, and low and high change places."""
    low, high = (None if bound is None else 0.0 - bound for bound in (loss.high, loss.low))
    return ScoreDifference(0.0 - loss.mean, low, high, loss.p, loss.p_holm, loss.pairs)


def _summarize_task(
    config: ComparisonConfig, task: FinetuneTask, runs: Sequence[RunData], arms: Sequence[ArmSummary]
) -> TaskSummary:
    by_cell: dict[str, dict[int, dict[str, Any]]] = {}
    results, failed, planned = [], [], 0
    for run in runs:
        if run.cell.rpartition("/")[2] != task.name:
            continue
        planned += 1
        result = run.result or {}
        if result.get("status") == "finished":
            by_cell.setdefault(run.cell, {})[run.seed] = result
            results.append(result)
        elif run.result is not None:
            failed.append(FailedRun(run.id, run.cell, run.seed, run.error))
    reference = arms[0]
    scored = {arm.variant: by_cell.get(finetune_cell(arm.cell, task), {}) for arm in arms}
    tested = [arm for arm in arms if arm is reference or arm.cell != reference.cell]
    scores = {arm.variant: {s: r["score"] for s, r in scored[arm.variant].items()} for arm in tested}
    judged = {arm.variant: arm for arm in judge_task(scores, config.confidence)}
    summary = TaskSummary(
        task=str(task),
        metric=task.metrics[0],
        majority=100 * results[0]["majority"][task.metrics[0]] if results else None,
        train_examples=results[0]["train_examples"] if results else None,
        validation_examples=results[0]["validation_examples"] if results else None,
        arms=tuple(
            replace(
                # an arm whose best cell is the reference's own is the reference
                judged.get(arm.variant) or replace(judged[reference.variant], variant=arm.variant),
                role=arm.role,
                cell=arm.cell,
                metrics=_mean_metrics(task, list(scored[arm.variant].values())),
            )
            for arm in arms
        ),
        runs=RunCounts(planned, len(results), tuple(failed)),
    )
    if not config.verdict:
        unjudged = (
            arm if arm.verdict == Verdict.REFERENCE else replace(arm, verdict=Verdict.NO_VERDICT)
            for arm in summary.arms
        )
        summary = replace(summary, arms=tuple(unjudged))
    return replace(summary, sentence=task_sentence(summary, config.confidence))


def _mean_metrics(task: FinetuneTask, results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    if not results:
        return {}
    return {name: 100 * float(np.mean([r["metrics"][name] for r in results])) for name in task.metrics}


def format_points(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−")


def task_sentence(summary: TaskSummary, confidence: float) -> str:
    """Return the outcome of a task in words."""
    reference, *others = summary.arms
    if reference.score is None or summary.majority is None:
        sentences = [f"{summary.task}: no verdict, because no model of the reference has been fine-tuned."]
    else:
        parts = [_arm_phrase(arm, confidence) for arm in others if arm.verdict != Verdict.REFERENCE]
        first = (
            f"{summary.task}: the reference scores {reference.score:.1f} "
            f"({METRIC_NAMES[summary.metric]}; majority class {summary.majority:.1f})"
        )
        sentences = ["; ".join([first, *parts]) + "."]
        if reference.score <= summary.majority:
            sentences.append(
                "The reference does not beat the majority class, so this task tells little at this size."
            )
    if failed := len(summary.runs.failed):
        sentences.append(f"{failed} of {summary.runs.planned} fine-tuning runs failed.")
    return " ".join(sentences)


def _arm_phrase(arm: TaskArm, confidence: float) -> str:
    difference = arm.difference
    if difference is None:
        return f"{arm.variant}: no verdict, because no seed is scored for both"
    effect = f"{format_points(difference.mean)} points"
    if difference.low is None or difference.high is None:
        return f"{arm.variant}: no verdict from one seed, {effect}"
    interval = f"{100 * confidence:.3g}% interval {format_points(difference.low)} to "
    interval += format_points(difference.high)
    if difference.p_holm is not None and math.isfinite(difference.p_holm):
        interval += f", {format_p_value(difference.p_holm)}"
    elif arm.verdict == Verdict.NO_VERDICT:
        interval = f"the same for all {difference.pairs} seeds, so its spread is unknown"
    subject = arm.variant if arm.verdict in (Verdict.HELPS, Verdict.HURTS) else f"{arm.variant}:"
    return f"{subject} {arm.verdict}, {effect} ({interval})"
