"""Tables of fine-tuned models: finetune.csv, the terminal and report.html."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qkflow.report.tables import VERDICT_STYLES, format_number, to_csv
from qkflow.studies.finetune.analysis import METRIC_NAMES, format_points
from qkflow.studies.finetune.results import TaskArm, TaskSummary

if TYPE_CHECKING:
    from rich.table import Table


def finetune_csv(tasks: Sequence[TaskSummary]) -> str:
    """Return one line per task and arm."""
    return to_csv(row for task in tasks for row in task.to_rows())


def task_tables(tasks: Sequence[TaskSummary]) -> list[dict[str, Any]]:
    """Return title, headings, rows and caption of each table, as text."""
    return [
        {
            "title": task.task,
            "headings": [
                METRIC_NAMES[task.metric],
                *(METRIC_NAMES[name] for name in task.other_metrics),
                *("Δ points", "interval", "p, Holm", "seeds", "verdict"),
            ],
            "rows": [(arm.variant, _cells(task, arm), arm.verdict) for arm in task.arms],
            "caption": _caption(task),
            "sentence": task.sentence,
        }
        for task in tasks
    ]


def terminal_tables(tasks: Sequence[TaskSummary]) -> list[Table]:
    """Return one table per task that fits 80 columns with names of usual length."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    tables = []
    for content in task_tables(tasks):
        table = Table(
            title=content["title"],
            title_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            caption=content["caption"],
            caption_justify="left",
        )
        table.add_column("variant", overflow="fold")
        for heading in content["headings"][:-1]:
            table.add_column(heading, justify="right")
        table.add_column("verdict", no_wrap=True)
        for variant, cells, verdict in content["rows"]:
            table.add_row(
                Text(variant, "bold"), *cells[:-1], Text(cells[-1], VERDICT_STYLES.get(verdict, ""))
            )
        tables.append(table)
    return tables


def _cells(task: TaskSummary, arm: TaskArm) -> list[str]:
    difference, interval = arm.difference, "–"
    if difference and difference.low is not None and difference.high is not None:
        interval = f"{format_points(difference.low)}…{format_points(difference.high)}"
    return [
        format_number(arm.score, ".1f"),
        *(format_number(arm.metrics.get(name), ".1f") for name in task.other_metrics),
        format_points(difference.mean) if difference else "–",
        interval,
        format_number(difference.p_holm if difference else None, ".2g"),
        f"{len(arm.seeds)}",
        str(arm.verdict),
    ]


def _caption(task: TaskSummary) -> str:
    if task.majority is None:
        return "No fine-tuning run has finished."
    return (
        f"majority class {task.majority:.1f}; {task.train_examples:,} training and "
        f"{task.validation_examples:,} validation examples"
    )
