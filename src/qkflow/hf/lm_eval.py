"""Tasks of the language-model evaluation harness, for our models and for models with a coupling attached."""

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
import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qkflow.errors import InputError
from qkflow.hf.pretrained import load_model_and_tokenizer

TASK_SUFFIXES = (".yaml", ".yml")


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
    """Results of `tasks` by name, each a mapping of measures, through lm-evaluation-harness.

    model       a run's folder, a `transformers` folder or name, or a model in memory with its `tokenizer`
    coupling    a folder that `hf.save_adapter` wrote, attached to a model that is opened here
    tasks       names the harness knows, or paths of YAML files that describe tasks of your own
    include     a folder with more tasks in YAML files
    limit, shots, batch   documents a task, examples shown before each, documents at a time
    device      where to compute (default: where the model is)
    """
    harness = _import_lm_eval()
    if not tasks:
        raise InputError("name at least one task, e.g. hellaswag")
    if isinstance(model, str | Path):
        model, own = load_model_and_tokenizer(model, coupling=coupling)
        tokenizer = own if tokenizer is None else tokenizer
    elif coupling is not None:
        raise InputError(
            f"a model in memory is evaluated as it is: hf.load_adapter(model, '{coupling}') attaches its coupling"
        )
    elif tokenizer is None:
        raise InputError("a model in memory needs its tokenizer: evaluate(model, tasks, tokenizer=…)")
    if device is not None:
        model.to(device)
    with _restore_mode_and_rng(model):
        manager, chosen = _load_tasks(harness, tasks, include_path, limit)
        wrapped = harness.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        at_work = _reject_nan_scores(wrapped)
        seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
        try:
            found = harness.simple_evaluate(
                model=wrapped,
                tasks=chosen,
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
            if at_work:  # the model's error is not the task's
                raise
            raise _task_error(tasks, error) from error
    return {task: _metrics(values) for task, values in found["results"].items()}


@contextlib.contextmanager
def _restore_mode_and_rng(model: PreTrainedModel) -> Iterator[None]:
    """Give back what the harness sets: evaluation mode and everybody's random numbers."""
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
    """What the model is at, if it is at work; scores that are no numbers are refused.

    Comparing NaNs finds the first choice the best of all.
    """
    at_work: list[str] = []

    def watched(name: str, ask: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def answer(*args: Any, **kwargs: Any) -> list[Any]:
            at_work.append(name)
            answers = ask(*args, **kwargs)
            at_work.pop()
            scores = [answer[0] if isinstance(answer, tuple) else answer for answer in answers]
            if any(isinstance(score, float) and math.isnan(score) for score in scores):
                raise InputError(
                    "the model's log-likelihoods are not numbers (NaN): its weights are of no use"
                )
            return answers

        return answer

    for name in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        setattr(lm, name, watched(name, getattr(lm, name)))
    return at_work


def _import_lm_eval() -> Any:
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise InputError(f'tasks need the evaluation harness ({error}): pip install "qkflow[eval]"') from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of every default it takes
    return SimpleNamespace(simple_evaluate=simple_evaluate, HFLM=HFLM, TaskManager=TaskManager)


def _load_tasks(
    harness: Any, tasks: Sequence[str], include_path: str | Path | None, limit: int | None
) -> tuple[Any, list[Any]]:
    """A task manager, and the tasks and groups of tasks with their questions."""
    tasks = list(dict.fromkeys(tasks))
    manager, names = _find_tasks(harness, tasks, include_path)
    chosen: list[Any] = []
    owners: dict[str, str] = {}
    for task, name in zip(tasks, names, strict=True):
        try:
            loaded = _load_task(manager, name)
            for one in loaded["tasks"].values():
                _check_answers(one, limit)
        except InputError:
            raise
        except Exception as error:
            raise _task_error([task], error) from error
        for one in loaded["tasks"]:  # the results of one would stand for both
            if owners.setdefault(one, task) != task:
                raise InputError(f"'{owners[one]}' and '{task}' both have a task '{one}': run them in turn")
        chosen += [loaded["groups"][name]] if name in loaded["groups"] else loaded["tasks"].values()
    return manager, chosen


def _find_tasks(harness: Any, tasks: Sequence[str], include_path: str | Path | None) -> tuple[Any, list[str]]:
    """A task manager that knows all of `tasks`, and what it calls them."""
    if include_path is not None and not Path(include_path).is_dir():
        raise InputError(f"there is no folder '{include_path}' to look for tasks in")
    folder = None if include_path is None else str(Path(include_path).resolve())
    # the harness comes with thousands of tasks, so they are read only if one is not among our own
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
            f"the harness knows no task '{task}': `lm-eval ls tasks` lists them; a task of your own is a "
            "YAML file, given by its path or found in the folder that `include` names"
        )
    if not path.is_file():
        raise InputError(f"there is no task file '{task}'")
    _check_task_file(path)
    return str(path.resolve())


def _check_task_file(path: Path) -> None:
    """Refuse what the harness takes for a task and then stumbles over."""

    class Reader(yaml.SafeLoader):
        """Leaves `!function module.name` as it is written."""

    Reader.add_constructor("!function", lambda _, node: node.value)
    try:
        with path.open("rb") as file:
            config = yaml.load(file, Reader)
    except (OSError, yaml.YAMLError) as error:
        raise _task_error([str(path)], error) from error
    if not isinstance(config, dict):
        raise InputError(f"'{path}' describes no task: it must give a 'task' its name and a 'dataset_path'")
    if "group" in config:
        raise InputError(
            f"'{path}' describes a group, which the harness knows by its name alone: ask for "
            f"'{config['group']}', with `include` the folder that holds the file and the group's tasks"
        )
    if config.keys() & {"include", "class"}:  # the rest stands elsewhere
        return
    for key, others in (("task", set()), ("dataset_path", {"custom_dataset"})):
        if not isinstance(config.get(key), str) and not config.keys() & others:
            raise InputError(f"the task file '{path}' has no '{key}', or one that is not a text")


def _load_task(manager: Any, name: str) -> dict[str, Any]:
    """A task with its questions: files of them are looked for from here, then beside the task's own."""
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
    """Refuse answers that no choice can match: the harness would count them as wrong."""
    if task.OUTPUT_TYPE != "multiple_choice" or task.config.process_results is not None:
        return
    for number, question in task.doc_iterator(limit=limit):
        choices = task.doc_to_choice(question)
        answers = task.doc_to_text(question) if task.multiple_input else task.doc_to_target(question)
        for answer in answers if isinstance(answers, list) else [answers]:
            is_number = isinstance(answer, int | float)
            if not (0 <= answer < len(choices) if is_number else answer in choices):
                raise InputError(
                    f"question {number + 1} of the task '{task.task_name}' has the answer {answer!r}, which "
                    f"is none of its {len(choices)} choices"
                )


def _task_error(tasks: Sequence[str], error: Exception) -> InputError:
    """What is wrong with a task, from what the harness stumbled over."""
    if type(error).__name__ == "DatasetGenerationError" and isinstance(error.__cause__, Exception):
        error = error.__cause__  # which says what is wrong with the questions
    name = f"the task '{tasks[0]}'" if len(tasks) == 1 else f"one of the tasks {', '.join(tasks)}"
    reason = " ".join(str(error).split())
    match error:
        case OSError():
            return InputError(
                f"the questions of {name} cannot be read ({reason}): data files are looked for from the "
                "working directory and beside the task file, and what is on the hub needs a network"
            )
        case StopIteration():
            reason = "there are no questions in its data file"
        case KeyError(args=(None,)):  # of the metric's aggregation
            reason = "its metric_list names a metric that the harness does not know"
        case KeyError():
            reason = f"it names {reason}, which is no split or column of its questions"
        case IndexError():
            reason = f"its first answer is none of its choices, or it has no questions ({reason})"
        case ValueError() if "larger than population" in reason:
            reason = "it has fewer examples than the shots asked for"
    return InputError(f"{name} cannot be run: {reason or type(error).__name__}")


def _metrics(values: dict[str, Any]) -> dict[str, float]:
    """`acc,none` → `acc`; what measures nothing (aliases, counts, "N/A") is left out."""
    return {
        key.removesuffix(",none"): float(value)
        for key, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and key != "sample_len"
    }
