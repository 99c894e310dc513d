"""Tasks of the language-model evaluation harness, for our models and for models with a coupling attached."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qkflow.errors import InputError
from qkflow.hub.folders import open_model

TASK_FILES = (".yaml", ".yml")


def evaluate(
    model: str | Path | PreTrainedModel,
    tasks: Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    coupling: str | Path | None = None,
    include: str | Path | None = None,
    limit: int | None = None,
    shots: int | None = None,
    batch: int = 8,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, dict[str, float]]:
    """Results of `tasks` by name, each a mapping of measures, through lm-evaluation-harness.

    model       a run's folder, a `transformers` folder or name, or a model in memory with its `tokenizer`
    coupling    a folder that `hub.save` wrote, to attach first
    tasks       names the harness knows, or paths of YAML files that describe tasks of your own
    include     a folder with more tasks in YAML files
    limit, shots, batch   documents a task, examples shown before each, documents at a time
    """
    harness = _harness()
    if not tasks:
        raise InputError("name at least one task, e.g. hellaswag")
    if isinstance(model, str | Path):
        model, tokenizer = open_model(model, coupling=coupling)
    elif tokenizer is None:
        raise InputError("a model in memory needs its tokenizer: evaluate(model, tasks, tokenizer=…)")
    manager, names = _find_tasks(harness, tasks, include)
    wrapped = harness.HFLM(pretrained=model.to(device), tokenizer=tokenizer, batch_size=batch)
    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    try:
        found = harness.simple_evaluate(
            model=wrapped,
            tasks=names,
            task_manager=manager,
            num_fewshot=shots,
            limit=limit,
            log_samples=False,
            bootstrap_iters=1000,
            **dict.fromkeys(seeds, seed),
        )
    except OSError as error:  # the questions are not where the task says
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"the questions of {', '.join(tasks)} cannot be read ({reason}): without a network, pass a task "
            "file of your own whose dataset_path is a local copy"
        ) from error
    return {task: _measures(values) for task, values in found["results"].items()}


def _harness() -> Any:
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise InputError(f'tasks need the evaluation harness ({error}): pip install "qkflow[eval]"') from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of every default it takes
    return SimpleNamespace(simple_evaluate=simple_evaluate, HFLM=HFLM, TaskManager=TaskManager)


def _find_tasks(harness: Any, tasks: Sequence[str], include: str | Path | None) -> tuple[Any, list[str]]:
    """A task manager that knows all of `tasks`, and what it calls them."""
    if include is not None and not Path(include).is_dir():
        raise InputError(f"there is no folder '{include}' to look for tasks in")
    folder = None if include is None else str(include)
    # the harness comes with thousands of tasks, so they are read only if one is not among our own
    for with_defaults in (False, True):
        manager = harness.TaskManager(include_path=folder, include_defaults=with_defaults)
        known = set(manager.all_tasks)
        if all(task in known or Path(task).suffix in TASK_FILES for task in tasks):
            break
    return manager, [task if task in known else _task_file(task) for task in tasks]


def _task_file(task: str) -> str:
    path = Path(task)
    if path.suffix not in TASK_FILES:
        raise InputError(
            f"the harness knows no task '{task}': `lm-eval ls tasks` lists them; a task of your own is a "
            "YAML file, given by its path or found in the folder that `include` names"
        )
    if not path.is_file():
        raise InputError(f"there is no task file '{task}'")
    return str(path)


def _measures(values: dict[str, Any]) -> dict[str, float]:
    """`acc,none` → `acc`; what measures nothing (aliases, counts, "N/A") is left out."""
    return {
        key.removesuffix(",none"): float(value)
        for key, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and key != "sample_len"
    }
