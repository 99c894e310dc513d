"""Configuration of a pace study; the options of `qkflow pace study` are the fields of `PaceStudyConfig`."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from qkflow.config_io import Confidence, Positive, Range, check_ranges, dataclass_from_dict
from qkflow.errors import InputError, unknown
from qkflow.studies.pace.recipes import OptimizerName, Recipe, get_recipe
from qkflow.training.pace import parse_ratio_schedule

STUDY_KIND = "pace study"
Task = Literal["agreement", "hatexplain", "squad", "sst-2", "cola", "mrpc", "rte"]
BASELINE_RATIO = "1"
Examples = Annotated[int, Range(1, 10**8, cost="examples are kept in memory, about 1 kB each")]
Size = Annotated[int, Range(1, 10**5)]
GENERATED_SOURCE = "generate"  # sentences made by the grammar of the agreement task


@dataclass(frozen=True)
class PaceStudyConfig:
    """Task, data, model and training. None is the value of the recipe of the task."""

    task: Task  # labeled task: agreement, hatexplain, squad, sst-2, cola, mrpc or rte.
    data: str | None = None  # file, folder or hf; agreement generates its own sentences by default.
    as_published: bool = False  # the authors' optimizer, learning rates, confounds and measures.
    seeds: Annotated[int, Range(1, 1000)] = 3  # number of paired seeds; a verdict needs at least 3.
    ratios: tuple[str, ...] | None = None  # query-key over other learning rates, e.g. 1,3,increasing:40.
    lr: Positive | None = None  # learning rate of all other parameters.
    optimizer: OptimizerName | None = None  # optimizer: adamw, or sgd with momentum 0.99.
    steps: Annotated[int, Range(1, 10**9)] | None = None  # training steps (default: from --epochs).
    epochs: Annotated[float, Range(above=0, high=10**6)] | None = None  # passes over the training examples.
    batch_size: Size | None = None  # examples per step.
    pretrained: str | None = None  # run or model folder to start from, with its tokenizer and size.
    n_layers: Annotated[int, Range(1, 10**4)] | None = None  # number of layers.
    dim: Size | None = None  # model dimension; the feed-forward dimension is four times as large.
    n_heads: Size | None = None  # number of attention heads.
    examples: Examples | None = None  # maximum number of training examples.
    window: Examples = 200  # SQuAD only: characters of context on either side of an answer.
    test: Examples = 1000  # maximum number of test examples.
    measured: Examples | None = None  # maximum number of test examples whose attention is measured.
    confidence: Confidence = 0.95  # confidence level of intervals and verdicts.

    @property
    def source(self) -> str:
        if self.data is not None:
            return self.data
        if self.task == "agreement":
            return GENERATED_SOURCE
        raise InputError(
            f"--data is required for {self.task}: give a file, a folder, or hf for the Hugging Face hub",
            code="missing-data",
        )

    def resolve_recipe(self) -> Recipe:
        """Return the recipe of the task with the overrides of this config."""
        names = (
            "ratios",
            "lr",
            "optimizer",
            "epochs",
            "batch_size",
            "n_layers",
            "dim",
            "n_heads",
            "measured",
        )
        overrides = {name: getattr(self, name) for name in names}
        hidden_dim = None if self.dim is None else 4 * self.dim
        return get_recipe(self.task, self.as_published, hidden_dim=hidden_dim, **overrides)

    def check(self) -> None:
        """Raise InputError for values no study can run with. Reads and writes nothing."""
        if self.steps is not None and self.epochs is not None:
            raise InputError("give --steps or --epochs, not both", code="steps-and-epochs")
        check_ranges(self, "")
        if self.pretrained is not None:
            for name in ("n_layers", "dim", "n_heads"):
                if getattr(self, name) is not None:
                    raise InputError(
                        f"{_flag(name)} is given by the model of --pretrained: leave it out",
                        code="size-of-pretrained",
                    )
        recipe = self.resolve_recipe()
        if recipe.optimizer not in get_args(OptimizerName):
            raise unknown("optimizer", recipe.optimizer, get_args(OptimizerName))
        if not recipe.ratios:
            raise InputError("--ratios is empty: give at least one ratio, e.g. 1,10", code="no-ratios")
        for ratio in recipe.ratios:
            parse_ratio_schedule(ratio, self.steps or sys.maxsize)

    def to_dict(self) -> dict[str, Any]:
        plain = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}
        return {"kind": STUDY_KIND, **plain}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PaceStudyConfig:
        return dataclass_from_dict(cls, {k: v for k, v in values.items() if k != "kind"}, "config")

    def to_command(self, out: Path) -> str:
        """Return the command line that runs this study."""
        words = ["qkflow", "pace", "study", self.task]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "task" or value == field.default:
                continue
            words.append(_flag(field.name))
            if value is not True:
                words.append(",".join(value) if isinstance(value, tuple) else str(value))
        return shlex.join([*words, "--out", str(out)])


@dataclass(frozen=True)
class PaceTrainConfig:
    """Training of one run. In a single-knob study only `ratio` differs between the runs of a seed."""

    ratio: str
    steps: int
    batch_size: int
    optimizer: OptimizerName
    lr: float
    weight_decay: float
    seed: int
    other_lr_scale: float = 1.0  # confounds of the published setting: see `Confounds`
    scale_embed_lr: bool = False
    freeze: tuple[str, ...] = ()


@dataclass(frozen=True)
class PaceRunConfig:
    """One run, as read by its worker."""

    task: str
    recipe: Recipe
    data_file: str  # in the folder of the study
    seq_len: int  # mean tokens per training example
    train: PaceTrainConfig
    as_published: bool  # measure as published
    pretrained: str | None = None  # model folder that every seed starts from

    def to_dict(self) -> dict[str, Any]:
        """Return the content of config.yaml, without `ratios`: adding one must not change the other runs."""
        start = {} if self.pretrained is None else {"pretrained": self.pretrained}
        return {
            **start,
            "task": self.task,
            "recipe": {**self.recipe.to_dict(), "ratios": []},
            "data": {"file": self.data_file, "seq_len": self.seq_len},
            "train": {**asdict(self.train), "freeze": list(self.train.freeze)},
            "measure": {"published": self.as_published},
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PaceRunConfig:
        return cls(
            values["task"],
            Recipe.from_dict(values["recipe"]),
            values["data"]["file"],
            values["data"]["seq_len"],
            dataclass_from_dict(PaceTrainConfig, values["train"], "train"),
            values["measure"]["published"],
            values.get("pretrained"),
        )


def is_pace_study(study: dict[str, Any]) -> bool:
    """Return whether the content of a study.yaml describes a pace study."""
    return bool(study["config"].get("kind") == STUDY_KIND)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
