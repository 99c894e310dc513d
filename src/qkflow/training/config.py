"""What a run is, as plain data: `config.yaml` of its folder, read into typed sections.

model: {preset: tiny, attention: {coupling: "leapfrog:n=7"}, start: gpt2}     # any field of ModelConfig
data:  {corpus: speeches, tokenizer: "bpe:2048", length: 128}
train: {tokens: 1M, batch: 16, lr: 3e-3}
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from qkflow.config_io import check_mapping, check_seed, dataclass_from_dict
from qkflow.errors import InputError, unknown
from qkflow.models.config import ModelConfig
from qkflow.models.presets import preset

Schedule = Literal["cosine", "wsd", "constant"]
Precision = Literal["fp32", "bf16"]
ParallelMode = Literal["none", "ddp", "fsdp"]
WriterName = Literal["tensorboard", "trackio", "wandb"]
DEFAULT_TOKENS = 1_000_000


@dataclass(frozen=True)
class DataConfig:
    corpus: str = "speeches"
    tokenizer: str = "bpe:2048"
    seq_len: int = 128  # tokens of a window
    fingerprint: str | None = None  # of the prepared set, where it must be that one and no other


@dataclass(frozen=True)
class TrainConfig:
    # The budget: one of three.
    tokens: int | None = None
    steps: int | None = None
    minutes: float | None = None  # of training; evaluation and checkpoints are not counted
    # The batch: windows of one optimizer step, over all processes and all parts it is accumulated from.
    batch_size: int = 16
    accumulate: int = 1
    # The optimizer: AdamW.
    lr: float = 3e-3
    schedule: Schedule = "cosine"
    warmup: float = 0.02  # below 1 a share of the run, else steps
    min_lr_factor: float = 0.1  # where cosine and wsd end, as a share of lr
    decay_ratio: float = 0.2  # the share of the run in which wsd falls
    weight_decay: float = 0.1  # of matrices
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip: float = 1.0  # largest norm of the gradient; 0 = any
    pace: float | dict[str, Any] | None = None  # how much faster the query-key circuit learns
    freeze: tuple[str, ...] = ()  # roles that stay as they start, e.g. [slow]
    seed: int = 0
    # How it is computed.
    precision: Precision = "fp32"
    compile: bool | str = False  # true, or a backend of torch.compile
    activation_checkpointing: bool = False
    parallel: ParallelMode | None = None  # default under torchrun: ddp
    device: str = "auto"
    # What is watched and kept. None of this changes what is learned.
    evaluations: int = 20
    eval_every: int | None = None  # steps; instead of `evaluations`
    eval_tokens: int | None = 32_768  # of the validation split; null = all of it
    probe_every: int | None = None  # steps; null = with every evaluation, 0 = never
    log_every: int | None = None
    save_every: int | None = None  # steps; instead of `save_minutes`
    save_minutes: float = 2.0
    keep_latest_k: int = 2  # checkpoints
    writers: tuple[WriterName, ...] = ()

    def __post_init__(self) -> None:
        given = [name for name in ("tokens", "steps", "minutes") if getattr(self, name) is not None]
        if len(given) > 1:
            raise InputError(f"train: give tokens, steps or minutes, not {' and '.join(given)} together")
        for name in ("tokens", "steps", "minutes", "batch_size", "accumulate", "lr", "eps", "evaluations", "keep_latest_k",
                     "eval_every", "eval_tokens", "log_every", "save_every", "save_minutes"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise InputError(f"train.{name} must be above zero, not {value}")
        for name in ("warmup", "weight_decay", "clip", "probe_every"):
            value = getattr(self, name)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise InputError(f"train.{name} cannot be negative, and is {value}")
        for name in ("min_lr_factor", "decay_ratio", "beta1", "beta2"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"train.{name} must lie between 0 and 1, not {getattr(self, name)}")
        check_seed("train.seed", self.seed)
        if self.batch_size % self.accumulate:
            raise InputError(
                f"a batch of {self.batch_size} windows cannot be accumulated from {self.accumulate} equal parts"
            )


# What may differ between the run that wrote a checkpoint and the run that goes on from it.
CHANGEABLE_ON_RESUME = {
    "compile", "activation_checkpointing", "parallel", "device", "evaluations", "eval_every", "eval_tokens",
    "probe_every", "log_every", "save_every", "save_minutes", "keep_latest_k", "writers",
}  # fmt: skip


@dataclass(frozen=True)
class RunConfig:
    model: dict[str, Any] = field(default_factory=dict)  # a preset and fields of ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    @classmethod
    def from_dict(cls, values: Any) -> RunConfig:
        if not isinstance(values, dict):
            raise InputError("a run's config has the sections model, data and train")
        for key in values:
            if key not in ("model", "data", "train"):
                raise unknown("section of the config", str(key), ("model", "data", "train"))
        model, data, train = (values.get(name) or {} for name in ("model", "data", "train"))
        config = cls(
            check_mapping(model, "model"),
            dataclass_from_dict(DataConfig, data, "data"),
            dataclass_from_dict(TrainConfig, train, "train"),
        )
        config.model_config(vocab_size=2)  # an unknown key should be said now, not after preparing the data
        return config

    @classmethod
    def load(cls, path: Path) -> RunConfig:
        try:
            text = path.read_text("utf-8")
        except (FileNotFoundError, NotADirectoryError):
            raise InputError(f"there is no {path}: give the folder of a run, or a config") from None
        except UnicodeDecodeError:
            raise InputError(f"{path} is not a text file") from None
        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise InputError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from None
        try:
            return cls.from_dict(values)
        except InputError as error:
            raise InputError(f"{path}: {error}", code=error.code) from None

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads; what is left at its default is left out."""
        return {
            "model": self.model,
            "data": _non_default_fields(self.data),
            "train": _non_default_fields(self.train),
        }

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)

    def model_config(self, vocab_size: int) -> ModelConfig:
        """The model for a tokenizer of `vocab_size` tokens."""
        values = dict(self.model)
        name = values.pop("preset", "tiny")
        own = values.pop("vocab_size", None)
        if isinstance(own, int) and own < vocab_size:
            raise InputError(
                f"model.vocab_size is {own}, too few for the tokenizer's {vocab_size} tokens: leave it out"
            )
        return preset(name, **values, vocab_size=vocab_size if own is None else own)

    def fingerprint(self, data_fingerprint: str) -> str:
        """Of everything that decides what is learned; `data` is the fingerprint of the tokens."""
        train = {
            name: value
            for name, value in dataclasses.asdict(self.train).items()
            if name not in CHANGEABLE_ON_RESUME
        }
        model = self.model_config(2).to_dict() | {"vocab_size": self.model.get("vocab_size")}
        text = json.dumps([model, self.data.seq_len, data_fingerprint, train], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def differences(self, other: RunConfig) -> list[str]:
        """What `other` sets otherwise, e.g. `train.lr is 0.001, not 0.003`."""
        mine, theirs = (_flatten({"model": c.model_config(2).to_dict(), "data": dataclasses.asdict(c.data),
                               "train": dataclasses.asdict(c.train)}) for c in (self, other))  # fmt: skip
        return [f"{key} is {mine[key]}, not {theirs[key]}" for key in mine if mine[key] != theirs[key]]


def _non_default_fields(section: Any) -> dict[str, Any]:
    pairs = ((f.name, f.default, getattr(section, f.name)) for f in dataclasses.fields(section))
    return {name: list(v) if isinstance(v, tuple) else v for name, default, v in pairs if v != default}


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
