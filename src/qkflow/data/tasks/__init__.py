"""Labeled tasks with human rationales: `load("hatexplain", "folder")`, or a task's own module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from qkflow.data.tasks import agreement, glue, hatexplain, squad
from qkflow.data.tasks.examples import Example, TaskDataset, majority_mask, token_mask, word_spans
from qkflow.errors import unknown

TASKS: dict[str, Callable[..., TaskDataset]] = {
    "agreement": agreement.load,
    "hatexplain": hatexplain.load,
    "squad": squad.load,
    **{name: partial(glue.load, name) for name in glue.GLUE_TASKS},
}

__all__ = ["TASKS", "Example", "TaskDataset", "load", "majority_mask", "token_mask", "word_spans"]


def load(task: str, source: str | Path, **options: Any) -> TaskDataset:
    """Load a task from a file, a folder or the hub (`hf`, `hf:owner/name`), with its module's options."""
    if task not in TASKS:
        raise unknown("task", task, TASKS)
    return TASKS[task](source, **options)
