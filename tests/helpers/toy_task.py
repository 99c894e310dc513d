"""Small data and models for the tests of the pace study."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from qkflow.studies.pace.config import PaceTrainConfig
from qkflow.studies.pace.dataset import DataLimits, TaskData, prepare_task_data
from qkflow.studies.pace.recipes import get_recipe
from qkflow.studies.pace.task_model import TaskModel, build_task_model


def load_task(task: str, source: str | Path, limits: DataLimits | None = None) -> TaskData:
    return prepare_task_data(task, str(source), get_recipe(task, False), limits or DataLimits())


def small_model(data: TaskData, task: str = "agreement", seed: int = 0) -> TaskModel:
    return build_task_model(get_recipe(task, False, dim=16, hidden_dim=32, head_dim=4), data, seed)


def train_config(**changes: Any) -> PaceTrainConfig:
    config = PaceTrainConfig("1", 10, batch_size=16, optimizer="adamw", lr=1e-3, weight_decay=0.0, seed=0)
    return replace(config, **changes)


def write_squad(folder: Path) -> Path:
    """Write 40 questions, each with its own paragraph."""
    paragraphs = []
    for number in range(40):
        answer = f"answer {number % 7}"
        context = f"{'some words before . ' * 3}the truth is {answer} , and {'more words after . ' * 3}"
        answers = [{"text": answer, "answer_start": context.index(answer)}]
        question = {"id": str(number), "question": f"what is truth {number} ?", "answers": answers}
        paragraphs.append({"context": context, "qas": [question]})
    path = folder / "dev-v1.1.json"
    path.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    return path


def write_hatexplain(
    folder: Path, train: list[dict[str, Any]], validation: list[dict[str, Any]] | None = None
) -> Path:
    for name, rows in (("train", train), ("val", validation or train)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
