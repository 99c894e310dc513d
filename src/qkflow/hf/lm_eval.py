"""Evaluation with lm-evaluation-harness, for qkflow models and models with a coupling attached."""

from __future__ import annotations

import contextlib
import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qkflow.errors import InputError, join_limited
from qkflow.hf.pretrained import load_model_and_tokenizer
from qkflow.plain_data import read_yaml

TASK_SUFFIXES = (".yaml", ".yml")
MAX_INCLUDES = 10  # of one task file by another


def evaluate(
    model: str | Path | PreTrainedModel,
    tasks: Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    coupling: str | Path | None = None,
    include_path: str | Path | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 8,
    device: str | None = None,
    seed: int = 0,
) -> dict[str, dict[str, float]]:
    """Run tasks of lm-evaluation-harness; return {task: {metric: value}}.

    model          a run folder, a `transformers` folder or Hub name, or a loaded model with its `tokenizer`
    tasks          task names of the harness, or paths of task YAML files
    coupling       a folder that `hf.save_adapter` wrote, attached to a model that is loaded here
    include_path   a folder with further task YAML files
    limit          documents per task
    num_fewshot    examples before each document
    device         default: the device of the model
    """
    harness = _import_lm_eval()
    if not tasks:
        raise InputError("name at least one task, e.g. hellaswag", code="no-tasks")
    if isinstance(model, str | Path):
        model, loaded_tokenizer = load_model_and_tokenizer(model, coupling=coupling)
        tokenizer = loaded_tokenizer if tokenizer is None else tokenizer
    elif coupling is not None:
        raise InputError(
            "coupling= needs the path of a model: for a loaded model call "
            f"hf.load_adapter(model, '{coupling}')",
            code="coupling-with-loaded-model",
        )
    elif tokenizer is None:
        raise InputError(
            "a loaded model needs its tokenizer: pass evaluate(model, tasks, tokenizer=…)",
            code="no-tokenizer",
        )
    if device is not None:
        model.to(device)
    with _restore_mode_and_rng(model):
        manager, loaded_tasks = _load_tasks(harness, tasks, include_path, limit)
        wrapped = harness.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        running = _reject_nan_scores(wrapped)
        seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
        try:
            output = harness.simple_evaluate(
                model=wrapped,
                tasks=loaded_tasks,
                task_manager=manager,
                num_fewshot=num_fewshot,
                limit=limit,
                log_samples=False,
                bootstrap_iters=1000,
                **dict.fromkeys(seeds, seed),
            )
        except InputError:
            raise
        except Exception as error:
            if running:  # an error of the model, not of the task
                raise
            raise _task_error(tasks, error) from error
    return {task: _metrics(values) for task, values in output["results"].items()}


@contextlib.contextmanager
def _restore_mode_and_rng(model: PreTrainedModel) -> Iterator[None]:
    """Restore what the harness changes: train mode and the state of all random generators."""
    training = [module for module in model.modules() if module.training]
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for module in training:
            module.training = True


def _reject_nan_scores(lm: Any) -> list[str]:
    """Make the model raise for NaN scores, of which the harness would take the first choice as argmax.

    Return the methods that are running now: none, unless an error comes from within the model.
    """
    running: list[str] = []

    def checked(name: str, method: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def call(*args: Any, **kwargs: Any) -> list[Any]:
            running.append(name)
            results = method(*args, **kwargs)
            running.pop()
            scores = [result[0] if isinstance(result, tuple) else result for result in results]
            if any(isinstance(score, float) and math.isnan(score) for score in scores):
                raise InputError(
                    "the log-likelihoods of the model are NaN: check its weights", code="nan-scores"
                )
            return results

        return call

    for name in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        setattr(lm, name, checked(name, getattr(lm, name)))
    return running


def _import_lm_eval() -> Any:
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise InputError(
            f'tasks need lm-evaluation-harness ({error}): pip install "qkflow[eval]"',
            code="missing-dependency",
        ) from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns about every default
    _sandbox_templates()
    return SimpleNamespace(simple_evaluate=simple_evaluate, HFLM=HFLM, TaskManager=TaskManager)


def _sandbox_templates() -> None:
    """Let the templates of task files reach the fields of a document alone, not the modules of Python."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from lm_eval import utils

    if not isinstance(utils.env, ImmutableSandboxedEnvironment):
        sandbox = ImmutableSandboxedEnvironment(
            loader=utils.env.loader,
            undefined=utils.env.undefined,
            keep_trailing_newline=utils.env.keep_trailing_newline,
        )
        sandbox.filters.update(utils.env.filters)
        utils.env = sandbox


def _load_tasks(
    harness: Any, tasks: Sequence[str], include_path: str | Path | None, limit: int | None
) -> tuple[Any, list[Any]]:
    """Return a task manager, and the tasks and task groups with their documents."""
    tasks = list(dict.fromkeys(tasks))
    manager, names = _find_tasks(harness, tasks, include_path)
    loaded_tasks: list[Any] = []
    owners: dict[str, str] = {}
    for task, name in zip(tasks, names, strict=True):
        try:
            loaded = _load_task(manager, name)
            for subtask in loaded["tasks"].values():
                _check_answers(subtask, limit)
        except InputError:
            raise
        except Exception as error:
            raise _task_error([task], error) from error
        for subtask_name in loaded["tasks"]:  # results are by name
            if owners.setdefault(subtask_name, task) != task:
                raise InputError(
                    f"'{owners[subtask_name]}' and '{task}' both have a task '{subtask_name}': evaluate them "
                    "separately",
                    code="duplicate-task",
                )
        in_group = name in loaded["groups"]
        loaded_tasks += [loaded["groups"][name]] if in_group else loaded["tasks"].values()
    return manager, loaded_tasks


def _find_tasks(harness: Any, tasks: Sequence[str], include_path: str | Path | None) -> tuple[Any, list[str]]:
    """Return a task manager that has all of `tasks`, and their names in it."""
    if include_path is not None and not Path(include_path).is_dir():
        raise InputError(f"include_path: there is no folder '{include_path}'", code="folder-not-found")
    folder = None if include_path is None else str(Path(include_path).resolve())
    for path in sorted(Path(folder).rglob("*")) if folder else ():
        if path.suffix in TASK_SUFFIXES:
            _read_task_file(path)
    # indexing the thousands of built-in tasks is slow: do it only if one of them is needed
    for with_defaults in (False, True):
        manager = harness.TaskManager(include_path=folder, include_defaults=with_defaults)
        known = set(manager.all_tasks)
        if all(task in known or Path(task).suffix in TASK_SUFFIXES for task in tasks):
            break
    return manager, [task if task in known else _resolve_task_file(task) for task in tasks]


def _resolve_task_file(task: str) -> str:
    path = Path(task)
    if path.suffix not in TASK_SUFFIXES:
        raise InputError(
            f"unknown task '{task}': `lm-eval ls tasks` lists the built-in ones; pass your own as the path "
            "of a YAML file, or by name with include_path, the folder of the file",
            code="unknown-task",
        )
    if not path.is_file():
        raise InputError(f"there is no task file '{task}'", code="task-file-not-found")
    _check_task_file(path)
    return str(path.resolve())


def _read_task_file(path: Path, including: tuple[Path, ...] = ()) -> Any:
    """Return the content of a task file. Refuse the tag `!function`, which runs code of its folder.

    The files that it includes are checked too, except those of the harness.
    """
    path = path.resolve()
    if path in including or len(including) > MAX_INCLUDES:
        raise InputError(f"the task file '{including[0]}' includes itself", code="invalid-task-file")
    try:
        config = read_yaml(path, code="invalid-task-file")
    except OSError as error:
        raise _task_error([str(path)], error) from error
    included = config.get("include", []) if isinstance(config, dict) else []
    for name in included if isinstance(included, list) else [included]:
        if not (path.parent / str(name)).resolve().is_relative_to(_harness_folder()):
            _read_task_file(path.parent / str(name), (*including, path))
    return config


def _harness_folder() -> Path:
    import lm_eval

    return Path(lm_eval.__file__).resolve().parent


def _check_task_file(path: Path) -> None:
    """Raise for task files that the harness would accept and then fail on."""
    config = _read_task_file(path)
    if not isinstance(config, dict):
        raise InputError(
            f"the task file '{path}' must be a mapping with 'task' and 'dataset_path'",
            code="invalid-task-file",
        )
    if "group" in config:
        raise InputError(
            f"'{path}' defines a task group, which is selected by name: pass '{config['group']}', with "
            "include_path the folder of the file and the group's tasks",
            code="task-group-file",
        )
    if config.keys() & {"include", "class"}:  # other files define the rest
        return
    for key, others in (("task", set()), ("dataset_path", {"custom_dataset"})):
        if not isinstance(config.get(key), str) and not config.keys() & others:
            raise InputError(
                f"the task file '{path}' has no '{key}', or one that is not a string",
                code="invalid-task-file",
            )


def _load_task(manager: Any, name: str) -> dict[str, Any]:
    """Load a task and its documents; data files are relative to the working directory or the task file."""
    try:
        return manager.load([name])
    except FileNotFoundError:
        entry = manager.task_index.get(name)
        file = Path(name) if entry is None else entry.yaml_path
        if file is None:
            raise
        with contextlib.chdir(file.parent):
            return manager.load([name])


def _check_answers(task: Any, limit: int | None) -> None:
    """Raise for answers that are not among the choices: the harness would count them as wrong."""
    if task.OUTPUT_TYPE != "multiple_choice" or task.config.process_results is not None:
        return
    for index, document in task.doc_iterator(limit=limit):
        choices = task.doc_to_choice(document)
        answers = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
        for answer in answers if isinstance(answers, list) else [answers]:
            is_number = isinstance(answer, int | float)
            if not (0 <= answer < len(choices) if is_number else answer in choices):
                raise InputError(
                    f"document {index + 1} of the task '{task.task_name}' has the answer {answer!r}, which "
                    f"is none of its {len(choices)} choices",
                    code="invalid-task-data",
                )


def _task_error(tasks: Sequence[str], error: Exception) -> InputError:
    """Return the error that explains an exception of the harness."""
    if type(error).__name__ == "DatasetGenerationError" and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the reason, without the wrapper
    name = f"the task '{tasks[0]}'" if len(tasks) == 1 else f"one of the tasks {join_limited(tasks, 8)}"
    reason = " ".join(str(error).split())
    match error:
        case OSError():
            return InputError(
                f"the data of {name} cannot be read ({reason}): data files are relative to the working "
                "directory or the task file, and Hub datasets need a network",
                code="task-data-unreadable",
            )
        case StopIteration():
            reason = "its data file has no documents"
        case KeyError(args=(None,)):  # aggregation of an unknown metric
            reason = "its metric_list has a metric that the harness does not have"
        case KeyError():
            reason = f"{reason} is not a split or column of its data"
        case IndexError():
            reason = f"its first answer is none of its choices, or it has no documents ({reason})"
        case ValueError() if "larger than population" in reason:
            reason = "it has fewer documents than num_fewshot"
    return InputError(f"{name} cannot be run: {reason or type(error).__name__}", code="invalid-task")


def _metrics(values: dict[str, Any]) -> dict[str, float]:
    """Return the numeric metrics with plain names (`acc,none` → `acc`), without aliases and counts."""
    return {
        key.removesuffix(",none"): float(value)
        for key, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and key != "sample_len"
    }
