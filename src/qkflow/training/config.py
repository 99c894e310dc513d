"""The config of a run, as stored in `config.yaml` of its folder.

model: {preset: tiny, attention: {coupling: "leapfrog:n=7"}, init: gpt2}     # any field of ModelConfig
data:  {corpus: speeches, tokenizer: "bpe:2048", seq_len: 128}
train: {tokens: 1M, batch_size: 16, lr: 3e-3}
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from qkflow.config_io import (
    Count,
    Fraction,
    NonNegative,
    Positive,
    Range,
    Seed,
    check_mapping,
    check_ranges,
    dataclass_from_dict,
)
from qkflow.errors import InputError, unknown
from qkflow.models.config import ModelConfig
from qkflow.models.presets import preset
from qkflow.plain_data import read_yaml
from qkflow.training.pace import check_pace

OptimizerName = Literal["adamw", "muon"]
Schedule = Literal["cosine", "wsd", "constant"]
Precision = Literal["fp32", "bf16"]
ParallelMode = Literal["none", "ddp", "fsdp", "hsdp"]
WriterName = Literal["tensorboard", "trackio", "wandb"]
DEFAULT_TOKENS = 1_000_000
BatchSize = Annotated[int, Range(1, 10**6)]
Tokens = Annotated[int, Range(1, 10**15, cost="the largest models were trained on 10^13")]
# Learning rates of `qkflow train` and `compare`: the best at 1M parameters. TrainConfig has that of AdamW.
DEFAULT_LR: dict[OptimizerName, float] = {"adamw": 3e-3, "muon": 1.2e-2}


@dataclass(frozen=True)
class DataConfig:
    """Corpus, tokenizer and window length."""

    corpus: str = "speeches"  # a built-in name, a path or hf:owner/name:config
    tokenizer: str = "bpe:2048"  # bytes, bpe:SIZE, a path or hf:NAME
    seq_len: Count = 128  # tokens per window
    fingerprint: str | None = None  # refuse a prepared corpus with another fingerprint

    def __post_init__(self) -> None:
        check_ranges(self, "data")


@dataclass(frozen=True)
class TrainConfig:
    """Budget, optimizer, compute and logging options of a run."""

    # Budget: one of tokens, steps and minutes.
    tokens: Tokens | None = None  # training tokens (default: 1M)
    steps: Count | None = None  # optimizer steps, instead of tokens
    minutes: Positive | None = None  # training time without evaluation and checkpoints, instead of tokens
    # Batch
    batch_size: BatchSize = 16  # windows per optimizer step, over all processes and microbatches
    accumulate: Count = 1  # microbatches per optimizer step
    # Optimizer
    optimizer: OptimizerName = "adamw"  # muon: Muon for hidden matrices, AdamW for the rest
    lr: Positive = 3e-3  # peak learning rate
    schedule: Schedule = "cosine"  # of the learning rate, after warmup
    warmup: NonNegative = 0.02  # below 1: fraction of the run; otherwise: steps
    min_lr_factor: Fraction = 0.1  # final learning rate of cosine and wsd, as a fraction of lr
    decay_ratio: Fraction = 0.2  # fraction of the run in which wsd decays
    weight_decay: NonNegative = 0.1  # of matrices; vectors and scalars have none
    beta1: Fraction = 0.9  # AdamW
    beta2: Fraction = 0.95  # AdamW
    eps: Positive = 1e-8  # AdamW
    momentum: Fraction = 0.95  # Muon
    clip: NonNegative = 1.0  # maximum gradient norm; 0: no clipping
    pace: float | str | dict[str, Any] | None = None  # learning-rate ratio of QK, e.g. 4 or early:0.25
    freeze: tuple[str, ...] = ()  # parameter roles that are not trained, e.g. [slow]
    seed: Seed = 0  # of the init and the batches
    # Compute
    precision: Precision = "fp32"  # bf16: autocast; weights stay fp32
    compile: bool | str = False  # compile every block: true, or a backend of torch.compile
    activation_checkpointing: bool = False  # recompute blocks in the backward pass to save memory
    parallel: ParallelMode | None = None  # under torchrun (default: ddp)
    shard_degree: Count | None = None  # processes per replica under hsdp (default: those of one machine)
    param_dtype: Precision = "fp32"  # of weights gathered by fsdp and hsdp; bf16 needs precision bf16
    reduce_dtype: Precision = "fp32"  # of gradients reduced by fsdp and hsdp
    device: str = "auto"  # auto, cpu, cuda or mps
    # Logging and checkpoints: none of these changes the trained weights.
    evaluations: Count = 20  # evenly spaced over the run
    eval_every: Count | None = None  # steps, instead of evaluations
    eval_tokens: Tokens | None = 32_768  # of the validation split; null: all of it
    final_eval_tokens: Tokens | None = None  # of the evaluation for result.json; null: as eval_tokens
    probe_every: Annotated[int, Range(0, 10**9)] | None = None  # steps; null: with every evaluation, 0: never
    log_every: Count | None = None  # steps
    save_every: Count | None = None  # steps, instead of save_minutes
    save_minutes: Positive = 2.0  # minutes between checkpoints
    keep_latest_k: Count = 2  # checkpoints to keep
    writers: tuple[WriterName, ...] = ()  # metrics loggers beside metrics.jsonl

    def __post_init__(self) -> None:
        budgets = [name for name in ("tokens", "steps", "minutes") if getattr(self, name) is not None]
        if len(budgets) > 1:
            raise InputError(
                f"train: set one of tokens, steps and minutes, not {' and '.join(budgets)}",
                code="several-budgets",
            )
        check_ranges(self, "train")
        if self.batch_size % self.accumulate:
            raise InputError(
                f"train.batch_size {self.batch_size} is not a multiple of train.accumulate {self.accumulate}",
                code="batch-not-divisible",
            )
        if self.param_dtype == "bf16" and self.precision != "bf16":
            raise InputError(
                f"train.param_dtype bf16 needs train.precision bf16, not {self.precision}",
                code="param-dtype-without-autocast",
            )
        if self.pace is not None:
            check_pace(self.pace, in_minutes=self.minutes is not None)


# Keys of `train` that may change when a run resumes from a checkpoint.
CHANGEABLE_ON_RESUME = {
    *("compile", "activation_checkpointing", "parallel", "shard_degree", "device", "evaluations"),
    *("eval_every",),
    *("eval_tokens", "final_eval_tokens", "probe_every", "log_every", "save_every", "save_minutes"),
    *("keep_latest_k", "writers"),
}


@dataclass(frozen=True)
class RunConfig:
    """All options of a run."""

    model: dict[str, Any] = field(default_factory=dict)  # a preset and fields of ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    @classmethod
    def from_dict(cls, values: Any) -> RunConfig:
        check_mapping(values, "config")
        for key in values:
            if key not in ("model", "data", "train"):
                raise unknown("section of the config", str(key), ("model", "data", "train"))
        model, data, train = (values.get(name) or {} for name in ("model", "data", "train"))
        config = cls(
            check_mapping(model, "model"),
            dataclass_from_dict(DataConfig, data, "data"),
            dataclass_from_dict(TrainConfig, train, "train"),
        )
        config.model_config(vocab_size=2)  # reports a wrong key before the data is prepared
        return config

    @classmethod
    def load(cls, path: Path) -> RunConfig:
        try:
            values = read_yaml(path, text_code="config-not-text")
        except (FileNotFoundError, NotADirectoryError):
            raise InputError(
                f"{path} does not exist: pass the folder of a run, or a config", code="config-not-found"
            ) from None
        try:
            return cls.from_dict(values)
        except InputError as error:
            raise InputError(f"{path}: {error}", code=error.code) from None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for `from_dict`, without the fields that have their default value."""
        return {
            "model": self.model,
            "data": _non_default_fields(self.data),
            "train": _non_default_fields(self.train),
        }

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)

    def model_config(self, vocab_size: int) -> ModelConfig:
        """Return the model config for a tokenizer with `vocab_size` tokens."""
        values = dict(self.model)
        name = values.pop("preset", "tiny")
        configured_size = values.pop("vocab_size", None)
        if isinstance(configured_size, int) and configured_size < vocab_size:
            raise InputError(
                f"model.vocab_size is {configured_size}, but the tokenizer has {vocab_size} tokens: leave "
                "model.vocab_size out",
                code="vocab-too-small",
            )
        model = preset(name, **values, vocab_size=vocab_size if configured_size is None else configured_size)
        if not model.causal:
            raise InputError(
                "model.causal is false, but training predicts the next token, which such a model attends to: "
                "leave model.causal out",
                code="model-not-causal",
            )
        return model

    def fingerprint(self, data_fingerprint: str) -> str:
        """Return a hash of everything that determines the trained weights."""
        train = {
            name: value
            for name, value in dataclasses.asdict(self.train).items()
            if name not in CHANGEABLE_ON_RESUME
        }
        if self.train.optimizer == "adamw":  # the keys of Muon do not matter
            del train["optimizer"], train["momentum"]
        for name in ("param_dtype", "reduce_dtype"):  # added later: older checkpoints do not have them
            if train[name] == "fp32":
                del train[name]
        model = self.model_config(2).to_dict() | {"vocab_size": self.model.get("vocab_size")}
        text = json.dumps([model, self.data.seq_len, data_fingerprint, train], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def differences(self, other: RunConfig) -> dict[str, tuple[Any, Any]]:
        """Return the values of both configs by key path, e.g. `train.lr`, where they differ."""
        values, other_values = (
            _flatten(
                {
                    "model": config.model_config(2).to_dict(),
                    "data": dataclasses.asdict(config.data),
                    "train": dataclasses.asdict(config.train),
                }
            )
            for config in (self, other)
        )
        return {
            key: (values.get(key), other_values.get(key))
            for key in dict.fromkeys([*values, *other_values])
            if values.get(key) != other_values.get(key)
        }


def _non_default_fields(section: Any) -> dict[str, Any]:
    pairs = ((f.name, f.default, getattr(section, f.name)) for f in dataclasses.fields(section))
    return {name: list(v) if isinstance(v, tuple) else v for name, default, v in pairs if v != default}


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
