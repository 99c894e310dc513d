"""The options of a comparison. The command line, the Python API and `study.yaml` all take them from here."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from qkflow.config_io import (
    Confidence,
    NonNegative,
    Percentage,
    Positive,
    Range,
    check_ranges,
    dataclass_from_dict,
    parse_count,
)
from qkflow.errors import InputError, shorten, unknown
from qkflow.studies.design import SCREENING_SEEDS, SeedDesign
from qkflow.studies.finetune.config import parse_tasks
from qkflow.studies.grammar import split_outside_braces
from qkflow.studies.stats import MIN_SEEDS_FOR_VERDICT
from qkflow.training.config import OptimizerName, Precision, Schedule, Tokens

MatchMode = Literal["tokens", "time", "flops"]
PresetName = Literal["tiny", "tiny-swiglu", "small", "60m", "150m", "350m", "350m-swiglu", "455m"]
EngineName = Literal["local", "ray", "slurm"]

AUTO = "auto"
MAX_SEEDS = 1000
Seeds = Annotated[int, Range(1, MAX_SEEDS)]
DEFAULT_TOKENS = 200_000
DEFAULT_INITS = ("gpt2", "fan_in", "modern")
_ALWAYS_IN_COMMAND = {"data", "variants", "seeds", "preset"}
_LISTS = ("variants", "baselines", "controls", "inits", "lr_factors", "finetune")
_CHOICES = {
    "match": get_args(MatchMode),
    "optimizer": get_args(OptimizerName),
    "preset": get_args(PresetName),
    "schedule": get_args(Schedule),
    "precision": get_args(Precision),
}


@dataclass(frozen=True)
class ComparisonConfig:
    """Everything that determines the runs of a comparison and how they are judged.

    The descriptions are also the help texts of `qkflow compare`.

    data        corpus: a built-in name, a path, or hf:NAME.
    variants    variants to compare, e.g. "euler,leapfrog:n=7,affine+differential,euler{step=0,0.1,1}".
    baselines   variants of the pool that every variant has to beat: the best of them with any init is the
                reference, e.g. "standard{attention.qk_norm=false,true}".
    controls    variants that could explain a gain by something simpler; `none` for no controls.
    inits       initializations that every variant and baseline is trained from, unless it fixes one, e.g.
                gpt2,fan_in,modern,mimetic.
    seeds       number of paired seeds that judge, at least 3 for a verdict; auto: seeds are added in rounds
                until every verdict is decided or --max-seeds is reached.
    max_seeds   the most seeds of --seeds auto.
    screening_seeds  seeds that choose the init of every variant and baseline that has several; they do not
                judge.
    margin      a variant within this percentage of the reference's perplexity is equivalent.
    preset      model size: tiny, tiny-swiglu, small, 60m, 150m, 350m, 350m-swiglu or 455m.
    tokens      training tokens per run, e.g. 200k or 1M.
    minutes     approximate duration of the whole comparison, instead of --tokens; costs are measured first.
    tokenizer   tokenizer: bytes, bpe:SIZE, a path or hf:NAME.
    seq_len     tokens per window.
    batch_size  windows per optimizer step.
    accumulate  microbatches per optimizer step, to save memory: `qkflow plan` tells how many a device needs.
    optimizer   muon (AdamW for embeddings, norms and scalars) or adamw, unless a variant sets its own.
    lr          learning rate, unless a variant sets train.lr (default: 0.012 with muon, 0.003 with adamw).
    schedule    learning-rate schedule: cosine, wsd or constant.
    precision   fp32, or bf16 for autocast: faster on a GPU, slower on a CPU that emulates bfloat16.
    tune_lr     search the learning rate of every variant and init on the same grid, which is widened until
                every optimum is interior.
    tune_tokens  training tokens per run of this search (default: as --tokens).
    lr_factors  first grid of this search, as factors of the learning rate.
    match       budget that all runs share: tokens, time or flops.
    verdict     with verdicts (default), or the numbers alone, which allows fewer than 3 seeds.
    confidence  level of intervals and verdicts.
    pilot       folder of an earlier comparison whose noise tells, before the first run, which effect this
                one can show.
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
    baselines: tuple[str, ...] = ("standard",)
    controls: tuple[str, ...] = ("symmetric", "uncoupled")
    inits: tuple[str, ...] = DEFAULT_INITS
    seeds: Seeds | Literal["auto"] = 5
    max_seeds: Annotated[int, Range(MIN_SEEDS_FOR_VERDICT, MAX_SEEDS)] = 20
    screening_seeds: Seeds = SCREENING_SEEDS
    margin: Percentage = 1.0
    preset: PresetName = "tiny"
    tokens: Tokens | None = None
    minutes: Annotated[float, Range(above=0, high=10**7, cost="20 years")] | None = None
    tokenizer: str = "bpe:2048"
    seq_len: Annotated[int, Range(2, high=10**6)] = 128
    batch_size: Annotated[int, Range(1, high=10**6)] = 16
    accumulate: Annotated[int, Range(1, high=10**6)] = 1
    optimizer: OptimizerName = "muon"
    lr: Positive | None = None
    schedule: Schedule = "cosine"
    precision: Precision = "fp32"
    tune_lr: bool = False
    tune_tokens: Tokens | None = None
    lr_factors: tuple[float, ...] = (0.5, 1.0, 2.0)
    match: MatchMode = "tokens"
    verdict: bool = True
    confidence: Confidence = 0.95
    pilot: str | None = None
    device: str = "auto"
    finetune: tuple[str, ...] = ()
    finetune_data: str = "hf"
    finetune_epochs: Annotated[int, Range(1, 10**4)] = 3
    finetune_lr: Positive = 5e-4
    finetune_examples: Annotated[int, Range(2, high=10**8)] | None = None

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
        if "seeds" in values:
            values["seeds"] = _parse_seeds(values["seeds"])
        if values.get("tokens") is not None:
            values["tokens"] = parse_count(values["tokens"])
        elif values.get("minutes") is None:
            values["tokens"] = DEFAULT_TOKENS
        if values.get("tune_tokens") is not None:
            values["tune_tokens"] = parse_count(values["tune_tokens"])
        return cls.from_dict(values)

    def check(self) -> None:
        """Raise InputError if no comparison can be run with these options."""
        check_ranges(self, "")
        self._check_choices()
        self._check_budget()
        self._check_seeds()
        if self.tune_lr and not (
            self.lr_factors and all(0 < factor < math.inf for factor in self.lr_factors)
        ):
            raise InputError("--lr-factors must be positive numbers, e.g. 0.5,1,2", code="invalid-lr-factors")
        if not self.variants:
            raise InputError("--variants is empty: use e.g. standard,euler", code="no-variants")
        if not self.baselines:
            raise InputError("--baselines is empty: use e.g. standard", code="no-baselines")
        if not self.inits:
            raise InputError("--inits is empty: use e.g. gpt2,fan_in", code="no-inits")
        parse_tasks(self.finetune)

    def _check_seeds(self) -> None:
        if self.seeds == AUTO:
            if not self.verdict:
                raise InputError(
                    "--seeds auto adds seeds until verdicts are decided: with --no-verdict, give a number",
                    code="auto-seeds-without-verdict",
                )
        elif self.verdict and self.n_seeds < MIN_SEEDS_FOR_VERDICT:
            raise InputError(
                f"a verdict needs at least {MIN_SEEDS_FOR_VERDICT} seeds, got --seeds {self.seeds}: "
                "use more, or --no-verdict for the numbers alone",
                code="too-few-seeds",
            )

    @property
    def n_seeds(self) -> int:
        """The number of judged seeds; with `auto` the most there can be."""
        return self.max_seeds if self.seeds == AUTO else int(self.seeds)

    def seed_design(self) -> SeedDesign:
        """Return the looks and tests of this study."""
        if self.seeds == AUTO:
            return SeedDesign.adaptive(self.max_seeds, self.confidence, self.margin_nats)
        return SeedDesign.fixed(self.confidence, self.margin_nats)

    @property
    def margin_nats(self) -> float:
        """The margin of equivalence as a difference of losses."""
        return math.log1p(self.margin / 100)

    def _check_choices(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise unknown(f"--{name}", getattr(self, name), choices)

    def _check_budget(self) -> None:
        if self.tokens is not None and self.minutes is not None:
            raise InputError("use --tokens or --minutes, not both", code="two-budgets")
        for name in ("tokens", "tune_tokens"):
            tokens = getattr(self, name)
            if tokens is not None and tokens < self.tokens_per_step:
                raise InputError(
                    f"--{name.replace('_', '-')} {tokens} is less than one step (--batch-size "
                    f"{self.batch_size} × --seq-len {self.seq_len} = {self.tokens_per_step} tokens): use "
                    "more tokens or a smaller batch",
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

    engine   where runs are executed: local processes, a ray cluster, or slurm for a job array.
    jobs     runs at a time (default: one per CPU core, or per GPU).
    threads  CPU threads per process.
    processes_per_run  processes of one run, on one machine: DDP, unless a variant sets train.parallel.
    cpus_per_run  CPU cores that a run reserves, with ray and slurm (default: threads × processes).
    gpus_per_run  GPUs that a run reserves, with ray (default: one per process, if there are any) and slurm.
    address  address of the ray cluster, HOST:PORT (default: one that runs here, or a new local one).
    slurm_options  more options of sbatch, e.g. "--partition=gpu --time=4:00:00".
    """

    engine: EngineName = "local"
    jobs: Annotated[int, Range(1, 4096)] | None = None
    threads: Annotated[int, Range(1, 4096)] = 1
    processes_per_run: Annotated[int, Range(1, 4096)] = 1
    cpus_per_run: Annotated[int, Range(1, 4096)] | None = None
    gpus_per_run: NonNegative | None = None
    address: str | None = None
    slurm_options: str | None = None

    @classmethod
    def split(cls, settings: Mapping[str, Any]) -> tuple[ExecutionConfig, dict[str, Any]]:
        """Return the checked config of these settings, and the settings that are not its fields."""
        names = {field.name for field in fields(cls)}
        config = cls(**{name: value for name, value in settings.items() if name in names})
        config.check()
        return config, {name: value for name, value in settings.items() if name not in names}

    def check(self) -> None:
        if self.engine not in get_args(EngineName):
            raise unknown("--engine", self.engine, get_args(EngineName))
        check_ranges(self, "")
        for name, engines in _ENGINE_OPTIONS.items():
            if getattr(self, name) is not None and self.engine not in engines:
                raise InputError(
                    f"--{name.replace('_', '-')} is an option of --engine {' or '.join(engines)}, "
                    f"not {self.engine}",
                    code="option-of-other-engine",
                )


_ENGINE_OPTIONS: dict[str, tuple[EngineName, ...]] = {
    "cpus_per_run": ("ray", "slurm"),
    "gpus_per_run": ("ray", "slurm"),
    "address": ("ray",),
    "slurm_options": ("slurm",),
}


def split_list(value: Any) -> tuple[Any, ...]:
    """Split `a,b` or `["a", "b{x=1,2}"]` at commas outside braces; `none` is the empty list."""
    texts = [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]
    parts = (item.strip() for text in texts for item in split_outside_braces(text, ","))
    items = tuple(item for item in parts if item)
    return () if items == ("none",) else items


def _parse_seeds(value: Any) -> int | str:
    if isinstance(value, int) or value == AUTO:
        return value
    try:
        return int(str(value)[:100])
    except ValueError:
        raise InputError(
            f"--seeds must be a number or auto, got {shorten(value)}", code="invalid-seeds"
        ) from None


def _parse_factors(items: Iterable[str]) -> tuple[float, ...]:
    try:
        return tuple(float(item) for item in items)
    except ValueError:
        raise InputError("--lr-factors must be numbers, e.g. 0.5,1,2", code="invalid-lr-factors") from None
