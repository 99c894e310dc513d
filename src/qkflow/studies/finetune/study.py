"""The fine-tuning runs of a comparison: every trained model on every task, with the seed of its training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qkflow.data.tokenizer import load_tokenizer
from qkflow.errors import InputError
from qkflow.studies.config import ComparisonConfig
from qkflow.studies.finetune.config import (
    BATCH_SIZE,
    WEIGHT_DECAY,
    FinetuneRunConfig,
    FinetuneTask,
    FinetuneTrainConfig,
    parse_tasks,
)
from qkflow.studies.finetune.dataset import TaskExamples, encode_task, load_task
from qkflow.studies.grid import RunSpec
from qkflow.studies.pace.dataset import TaskData, save_task_data
from qkflow.studies.runner.study_dir import StudyDir
from qkflow.training.pretrained import tokenizer_spec
from qkflow.training.run_dir import MODEL_DIR

WORKER_MODULE = "qkflow.studies.finetune.worker"
PHASE = "finetune"


def load_tasks(config: ComparisonConfig) -> list[TaskExamples]:
    """Load all tasks of a comparison; raise InputError before anything is trained."""
    limit = config.finetune_examples
    return [load_task(task, config.finetune_data, limit) for task in parse_tasks(config.finetune)]


def plan_runs(
    config: ComparisonConfig, tasks: Sequence[TaskExamples], compared: Sequence[RunSpec], study_dir: StudyDir
) -> list[RunSpec]:
    """Return one run per finished model and task, and write the encoded examples to the study's folder.

    All models of a comparison have the same tokenizer. The runs of one seed come first, so that pairs are
    complete early.
    """
    finished = [run for run in compared if study_dir.run_dir(run.id).is_finished]
    if not finished:
        return []
    for run in finished:
        _check_model(study_dir.run_dir(run.id).path)
    tokenizer = load_tokenizer(tokenizer_spec(study_dir.run_dir(finished[0].id).path))
    encoded = [(each.task, encode_task(each, tokenizer, config.seq_len)) for each in tasks]
    data_files = [save_task_data(data, study_dir.path) for _, data in encoded]
    return [
        _run_spec(config, run, task, data, file)
        for seed in sorted({run.seed for run in finished})
        for (task, data), file in zip(encoded, data_files, strict=True)
        for run in finished
        if run.seed == seed
    ]


def _check_model(folder: Path) -> None:
    if not (folder / MODEL_DIR).is_dir():
        raise InputError(
            f"{folder} has no trained model: restore its folder '{MODEL_DIR}', or delete the run to train it "
            "again",
            code="model-not-found",
        )


def _run_spec(
    config: ComparisonConfig, pretrained: RunSpec, task: FinetuneTask, data: TaskData, file: str
) -> RunSpec:
    steps = config.finetune_epochs * -(-len(data.train) // BATCH_SIZE)
    train = FinetuneTrainConfig(
        steps, BATCH_SIZE, config.finetune_lr, WEIGHT_DECAY, pretrained.seed, config.device
    )
    run_config = FinetuneRunConfig(pretrained.id, task, file, data.mean_length, train)
    tokens = steps * BATCH_SIZE * data.mean_length
    cell = finetune_cell(pretrained.cell, task)
    return RunSpec(PHASE, cell, pretrained.seed, config.finetune_lr, tokens, run_config.to_dict())


def finetune_cell(cell: str, task: FinetuneTask) -> str:
    """Return the cell of a fine-tuning run: that of the model, and the task."""
    return f"{cell}/{task.name}"
