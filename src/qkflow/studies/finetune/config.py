"""The options of fine-tuning, and the config of one fine-tuning run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkflow.config_io import check_mapping, dataclass_from_dict
from qkflow.data.tasks.examples import is_hub_source
from qkflow.data.tasks.glue import GLUE_TASKS
from qkflow.errors import InputError, unknown

if TYPE_CHECKING:
    from qkflow.studies.config import ComparisonConfig

SUITE = "glue"
BATCH_SIZE = 32
WEIGHT_DECAY = 0.01
# The first metric of a task is the score that it is judged by.
TASK_METRICS = {
    "sst-2": ("accuracy",),
    "cola": ("mcc",),
    "mrpc": ("accuracy", "f1"),
    "rte": ("accuracy",),
}


@dataclass(frozen=True)
class FinetuneTask:
    """One labeled task, e.g. `glue:CoLA`."""

    key: str  # in GLUE_TASKS

    @property
    def name(self) -> str:
        return GLUE_TASKS[self.key].folder

    @property
    def metrics(self) -> tuple[str, ...]:
        return TASK_METRICS[self.key]

    def __str__(self) -> str:
        return f"{SUITE}:{self.name}"


def parse_tasks(texts: Sequence[str]) -> tuple[FinetuneTask, ...]:
    """Parse `glue:SST-2`, `CoLA`, …: an entry without a suite belongs to the suite before it.

    Names are case-insensitive; `glue` alone is all of its tasks.
    """
    keys: list[str] = []
    suite = ""
    for text in texts:
        before, colon, name = text.strip().rpartition(":")
        if name.lower() == SUITE:
            before, colon, name = name, ":", ""
        suite = before.strip().lower() if colon else suite
        if not suite:
            raise InputError(
                f"--finetune {text} names no suite: write {SUITE}:{text}", code="missing-task-suite"
            )
        if suite != SUITE:
            raise unknown("suite of --finetune", suite, [SUITE], code="unknown-task-suite")
        key = name.strip().lower()
        if key and key not in GLUE_TASKS:
            raise unknown("GLUE task", key, GLUE_TASKS)
        keys += [key] if key else GLUE_TASKS
    return tuple(FinetuneTask(key) for key in dict.fromkeys(keys))


def check_source(config: ComparisonConfig) -> None:
    """Raise InputError if the tasks cannot be read: needed to run a study, not to report that of another."""
    source = config.finetune_data
    if config.finetune and not is_hub_source(source) and not Path(source).is_dir():
        raise InputError(
            f"--finetune-data {source} is not a folder: give the folder of the GLUE files, or hf",
            code="path-not-found",
        )


@dataclass(frozen=True)
class FinetuneTrainConfig:
    """Training of one fine-tuning run: the same for all models of a seed."""

    steps: int
    batch_size: int
    lr: float
    weight_decay: float
    seed: int
    device: str = "auto"


@dataclass(frozen=True)
class FinetuneRunConfig:
    """One fine-tuning run, as read by its worker."""

    pretrained: str  # id of the run whose model is fine-tuned
    task: FinetuneTask
    data_file: str  # in the folder of the study
    seq_len: int  # mean tokens per training example
    train: FinetuneTrainConfig

    def to_dict(self) -> dict[str, Any]:
        return {
            "pretrained": self.pretrained,
            "task": str(self.task),
            "data": {"file": self.data_file, "seq_len": self.seq_len},
            "train": asdict(self.train),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> FinetuneRunConfig:
        data = check_mapping(values["data"], "data")
        return cls(
            values["pretrained"],
            parse_tasks([values["task"]])[0],
            data["file"],
            data["seq_len"],
            dataclass_from_dict(FinetuneTrainConfig, values["train"], "train"),
        )
