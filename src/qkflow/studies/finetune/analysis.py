"""From fine-tuning runs to verdicts: every variant against the reference, at the cells chosen by loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from qkflow.errors import InputError
from qkflow.plain_data import has_layout
from qkflow.studies.config import ComparisonConfig
from qkflow.studies.design import SeedDesign, Verdict
from qkflow.studies.finetune.config import FinetuneTask, parse_tasks
from qkflow.studies.finetune.results import ScoreDifference, TaskArm, TaskSummary
from qkflow.studies.finetune.study import PHASE, finetune_cell
from qkflow.studies.results import ArmSummary, CorrectedDifference, FailedRun, RunCounts
from qkflow.studies.sentences import format_p_value
from qkflow.studies.verdicts import correct_family, decide_verdict

if TYPE_CHECKING:
    from qkflow.studies.run_data import RunData

METRIC_NAMES = {"accuracy": "accuracy", "mcc": "MCC", "f1": "F1"}


def summarize_tasks(
    config: ComparisonConfig, runs: Sequence[RunData], arms: Sequence[ArmSummary]
) -> tuple[TaskSummary, ...]:
    """Judge every task of a comparison. The first arm is the reference."""
    finetuned = [run for run in runs if run.phase == PHASE]
    return tuple(_summarize_task(config, task, finetuned, arms) for task in parse_tasks(config.finetune))


def judge_task(
    scores_by_arm: Mapping[str, Mapping[int, float]], confidence: float, margin: float = 1.0
) -> list[TaskArm]:
    """Compare the scores by seed of each arm with those of the first, which is the reference.

    The differences are paired by seed, and corrected by Holm's method over all arms of the task. Scores are
    fractions, results and the margin of equivalence are points. Losses are judged elsewhere: minus the score
    is what gets better downward. The number of seeds was decided by losses, not by scores, so this is one
    look.
    """
    design = SeedDesign.fixed(confidence, margin)
    (reference, base), *others = scores_by_arm.items()
    differences = {}
    for name, scores in others:
        if seeds := sorted(scores.keys() & base.keys()):
            losses, base_losses = ([-100 * each[seed] for seed in seeds] for each in (scores, base))
            difference = design.difference(losses, base_losses)
            if difference.mean and difference.low == difference.high:
                # Scores are discrete, so a few seeds may agree by chance: there is no spread to test with.
                difference = replace(difference, p=None, p_equivalent=None)
            differences[name] = difference
    family = correct_family(differences)
    judged = [replace(_task_arm(reference, base), role="reference", verdict=Verdict.REFERENCE)]
    for name, scores in others:
        tested = family.get(name)
        judged.append(
            replace(
                _task_arm(name, scores),
                difference=None if tested is None else _in_points(tested),
                verdict=decide_verdict(tested, confidence, margin),
            )
        )
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
    planned = [run for run in runs if run.cell.rpartition("/")[2] == task.name]
    finished = [run for run in planned if (run.result or {}).get("status") == "finished"]
    for run in finished:
        _check_result(run, task)
    failed = [run for run in planned if run.result is not None and run not in finished]
    results_by_cell: dict[str, dict[int, dict[str, Any]]] = {}
    for run in finished:
        results_by_cell.setdefault(run.cell, {})[run.seed] = run.result or {}
    facts = (finished[0].result or {}) if finished else {}
    summary = TaskSummary(
        task=str(task),
        metric=task.metrics[0],
        majority=100 * facts["majority"][task.metrics[0]] if facts else None,
        train_examples=facts.get("train_examples"),
        validation_examples=facts.get("validation_examples"),
        arms=tuple(_judge_arms(config, task, results_by_cell, arms)),
        runs=RunCounts(
            len(planned),
            len(finished),
            tuple(FailedRun(run.id, run.cell, run.seed, run.error) for run in failed),
        ),
    )
    return replace(summary, sentence=task_sentence(summary, config.confidence))


def _check_result(run: RunData, task: FinetuneTask) -> None:
    scores = dict.fromkeys(task.metrics, float)
    counts = {"train_examples": int, "validation_examples": int}
    if not has_layout(run.result, {"score": float, "metrics": scores, "majority": scores, **counts}):
        raise InputError(
            f"the result.json of the run {run.id} lacks scores of {task}: remove the file to train the run "
            "again",
            code="corrupt-result",
        )


def _judge_arms(
    config: ComparisonConfig,
    task: FinetuneTask,
    results_by_cell: Mapping[str, Mapping[int, Mapping[str, Any]]],
    arms: Sequence[ArmSummary],
) -> Iterator[TaskArm]:
    """Yield every arm. One whose best cell is the reference's own is the reference, and is not tested."""
    reference = arms[0]
    results = {arm.variant: results_by_cell.get(finetune_cell(arm.cell, task), {}) for arm in arms}
    tested = [arm.variant for arm in arms if arm is reference or arm.cell != reference.cell]
    scores = {name: {seed: r["score"] for seed, r in results[name].items()} for name in tested}
    judged = {arm.variant: arm for arm in judge_task(scores, config.confidence, config.margin)}
    for arm in arms:
        result = replace(
            judged.get(arm.variant, judged[reference.variant]),
            variant=arm.variant,
            role=arm.role,
            cell=arm.cell,
            metrics=_mean_metrics(task, list(results[arm.variant].values())),
        )
        is_judged = config.verdict or result.verdict == Verdict.REFERENCE
        yield result if is_judged else replace(result, verdict=Verdict.NO_VERDICT)


def _mean_metrics(task: FinetuneTask, results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    if not results:
        return {}
    return {name: 100 * float(np.mean([r["metrics"][name] for r in results])) for name in task.metrics}


def format_points(value: float) -> str:
    """Format a difference of scores with its sign (a true minus)."""
    return f"{round(value, 1) + 0.0:+.1f}".replace("-", "−")


def chance_margin(metric: str, n_examples: int) -> float:
    """Return two standard errors, in points, of guesses of two equally frequent classes."""
    return (200 if metric == "mcc" else 100) / math.sqrt(n_examples)


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
        margin = chance_margin(summary.metric, summary.validation_examples or 1)
        if reference.score <= summary.majority + margin:
            sentences.append(
                "The reference does not clearly beat the majority class (two standard errors are "
                f"{margin:.1f} points), so this task tells little at this size."
            )
    planned, failed = summary.runs.planned, len(summary.runs.failed)
    if failed:
        sentences.append(f"{failed} of {planned} fine-tuning runs failed.")
    if left := planned - summary.runs.finished - failed:
        sentences.append(f"{left} of {planned} fine-tuning runs have not finished.")
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
