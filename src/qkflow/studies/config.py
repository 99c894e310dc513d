"""The options of a comparison. The command line, the Python API and `study.yaml` all take them from here."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from qkflow.config_io import dataclass_from_dict, parse_count
from qkflow.errors import InputError, unknown
from qkflow.studies.finetune.config import check_options as check_finetune_options
from qkflow.studies.stats import MIN_SEEDS_FOR_VERDICT
from qkflow.training.config import Schedule

MatchMode = Literal["tokens", "time", "flops"]
PresetName = Literal["tiny", "small", "60m", "150m", "350m", "455m"]
EngineName = Literal["local", "ray"]

DEFAULT_TOKENS = 200_000
_ALWAYS_IN_COMMAND = {"data", "variants", "seeds", "preset"}
_LISTS = ("variants", "controls", "inits", "lr_factors", "finetune")
_CHOICES = {"match": get_args(MatchMode), "preset": get_args(PresetName), "schedule": get_args(Schedule)}


@dataclass(frozen=True)
class ComparisonConfig:
    """Everything that determines the runs of a comparison and how they are judged.

    The descriptions are also the help texts of `qkflow compare`.

    data        corpus: a built-in name, a path, or hf:NAME.
    variants    variants to compare, e.g. standard,euler,leapfrog:n=7,affine+differential,euler@fan_in.
    controls    variants that could explain a gain by something simpler; `none` for no controls.
    inits       initializations that every variant and the standard model are trained from, e.g.
                gpt2,fan_in,mimetic.
    seeds       number of paired seeds; a verdict needs at least 3.
    preset      model size: tiny, small, 60m, 150m, 350m or 455m.
    tokens      training tokens per run, e.g. 200k or 1M.
    minutes     approximate duration of the whole comparison, instead of --tokens; costs are measured first.
    tokenizer   tokenizer: bytes, bpe:SIZE, a path or hf:NAME.
    seq_len     tokens per window.
    batch_size  windows per optimizer step.
    lr          learning rate.
    schedule    learning-rate schedule: cosine, wsd or constant.
    tune_lr     search the learning rate of every variant and init on the same small grid.
    lr_factors  grid of this search, as factors of --lr.
    match       budget that all runs share: tokens, time or flops.
    verdict     with verdicts (default), or the numbers alone, which allows fewer than 3 seeds.
    confidence  level of intervals and verdicts.
    device      device: auto, cpu, cuda or mps.
    finetune    tasks to fine-tune every trained model on, e.g. glue:SST-2,CoLA,MRPC,RTE; the time is
                not part of --minutes.
    finetune_data  folder with the original files of the tasks, or the hub: hf or hf:NAME.
    finetune_epochs  epochs of fine-tuning.
    finetune_lr  learning rate of fine-tuning.
    finetune_examples  limit of training examples per task (default: all).
    """

    data: str = "speeches"
    variants: tuple[str, ...] = ("standard", "euler", "drift")
    controls: tuple[str, ...] = ("symmetric", "uncoupled")
    inits: tuple[str, ...] = ("gpt2", "fan_in")
    seeds: int = 3
    preset: PresetName = "tiny"
    tokens: int | None = None
    minutes: float | None = None
    tokenizer: str = "bpe:2048"
    seq_len: int = 128
    batch_size: int = 16
    lr: float = 3e-3
    schedule: Schedule = "cosine"
    tune_lr: bool = False
    lr_factors: tuple[float, ...] = (0.5, 1.0, 2.0)
    match: MatchMode = "tokens"
    verdict: bool = True
    confidence: float = 0.95
    device: str = "auto"
    finetune: tuple[str, ...] = ()
    finetune_data: str = "hf"
    finetune_epochs: int = 3
    finetune_lr: float = 5e-4
    finetune_examples: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ComparisonConfig:
        """Build a config from typed values, as `to_dict` returns them."""
        return dataclass_from_dict(cls, dict(values), "config")

    @classmethod
    def parse(cls, **settings: Any) -> ComparisonConfig:
        """Build a config from loosely typed settings: lists as comma-separated text, tokens as `200k`.

        Without tokens and minutes, the budget is DEFAULT_TOKENS.
        """
        values = dict(settings)
        known = {field.name for field in fields(cls)}
        for name in values:
            if name not in known:
                raise unknown("setting of a comparison", name, known)
        for name in _LISTS:
            if name in values:
                values[name] = split_list(values[name])
        for name, choices in _CHOICES.items():
            if name in values and values[name] not in choices:
                raise unknown(f"--{name}", str(values[name]), choices)
        if "lr_factors" in values:
            values["lr_factors"] = _parse_factors(values["lr_factors"])
        if values.get("tokens") is not None:
            values["tokens"] = parse_count(values["tokens"])
        elif values.get("minutes") is None:
            values["tokens"] = DEFAULT_TOKENS
        return cls.from_dict(values)

    def check(self) -> None:
        """Raise InputError if no comparison can be run with these options."""
        self._check_choices()
        self._check_budget()
        if self.seeds < 1:
            raise InputError(f"--seeds must be at least 1, got {self.seeds}", code="invalid-seeds")
        if self.verdict and self.seeds < MIN_SEEDS_FOR_VERDICT:
            raise InputError(
                f"a verdict needs at least {MIN_SEEDS_FOR_VERDICT} seeds, got --seeds {self.seeds}: "
                "add seeds, or use --no-verdict for the numbers alone",
                code="too-few-seeds",
            )
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise InputError(f"--lr must be a positive number, got {self.lr:g}", code="invalid-lr")
        if self.tune_lr and not (self.lr_factors and all(factor > 0 for factor in self.lr_factors)):
            raise InputError("--lr-factors must be positive numbers, e.g. 0.5,1,2", code="invalid-lr-factors")
        if not 0.5 <= self.confidence < 1:
            raise InputError(
                f"--confidence must be between 0.5 and 1, got {self.confidence:g}", code="invalid-confidence"
            )
        if not self.variants:
            raise InputError("--variants is empty: use e.g. standard,euler", code="no-variants")
        if not self.inits:
            raise InputError("--inits is empty: use e.g. gpt2,fan_in", code="no-inits")
        check_finetune_options(self)

    def _check_choices(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise unknown(f"--{name}", getattr(self, name), choices)

    def _check_budget(self) -> None:
        if self.tokens is not None and self.minutes is not None:
            raise InputError("use --tokens or --minutes, not both", code="two-budgets")
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise InputError(
                f"--minutes must be a number above zero, got {self.minutes:g}", code="invalid-minutes"
            )
        for name, least in (("seq_len", 2), ("batch_size", 1)):
            if getattr(self, name) < least:
                flag = name.replace("_", "-")
                raise InputError(
                    f"--{flag} must be at least {least}, got {getattr(self, name)}", code=f"invalid-{flag}"
                )
        if self.tokens is not None and self.tokens < self.tokens_per_step:
            raise InputError(
                f"--tokens {self.tokens} is less than one step (--batch-size {self.batch_size} × --seq-len "
                f"{self.seq_len} = {self.tokens_per_step} tokens): use more tokens or a smaller batch",
                code="tokens-below-one-step",
            )

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len

    def to_command(self, out: str) -> str:
        """Return the command line of this comparison, with the main options and all that are not default."""
        words, default = ["qkflow", "compare"], ComparisonConfig()
        for field in fields(self):
            value = getattr(self, field.name)
            is_default = value == getattr(default, field.name)
            if value is None or (is_default and field.name not in _ALWAYS_IN_COMMAND):
                continue
            flag = "--" + field.name.replace("_", "-")
            if isinstance(value, bool):
                words.append(flag if value else flag.replace("--", "--no-", 1))
            elif isinstance(value, tuple):
                words += [flag, ",".join(f"{v:g}" if isinstance(v, float) else v for v in value) or "none"]
            else:
                words += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
        return shlex.join([*words, "--out", out])

    def default_folder(self) -> Path:
        """Return runs/DATA-PRESET-BUDGET: the same command finds its folder again and resumes there."""
        budget = f"{self.minutes:g}min" if self.minutes else f"{self.tokens}"
        name = f"{self.data}-{self.preset}-{budget}"
        return Path("runs") / re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")


@dataclass(frozen=True)
class ExecutionConfig:
    """How the runs of a study are executed. Does not influence their results.

    engine   where runs are executed: local processes, or ray for a cluster.
    jobs     runs at a time (default: one per CPU core, or per GPU).
    threads  CPU threads per run.
    """

    engine: EngineName = "local"
    jobs: int | None = None
    threads: int = 1

    def check(self) -> None:
        if self.engine not in get_args(EngineName):
            raise unknown("--engine", self.engine, get_args(EngineName))
        for name in ("jobs", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name} must be at least 1, got {value}", code=f"invalid-{name}")


def split_list(value: str | Iterable[Any]) -> tuple[Any, ...]:
    """Split `a,b` or `["a", "b,c"]` at commas; `none` is the empty list."""
    texts = [value] if isinstance(value, str) else [str(item) for item in value]
    items = tuple(item.strip() for text in texts for item in text.split(",") if item.strip())
    return () if items == ("none",) else items


def _parse_factors(items: Iterable[str]) -> tuple[float, ...]:
    try:
        return tuple(float(item) for item in items)
    except ValueError:
        raise InputError("--lr-factors must be numbers, e.g. 0.5,1,2", code="invalid-lr-factors") from None
