"""From a question to runs: which variants, from which starts, with which seeds, each as one run's config."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

from qkflow.attention import InitScheme
from qkflow.errors import InputError, unknown
from qkflow.models.presets import PRESETS
from qkflow.studies.stats import MIN_SEEDS_FOR_VERDICT
from qkflow.studies.variants import (
    STANDARD,
    ComponentRegistry,
    Variant,
    parse_variants,
    registered_components,
)
from qkflow.training.config import Schedule

MATCH_MODES = ("tokens", "time", "flops")
TUNING_SEED = 10_000  # learning rates are chosen on a seed that takes no part in the comparison
CALIBRATION_SEEDS = (20_000, 20_001, 20_002)
CALIBRATION_STEPS = 20
EVALS_PER_RUN = 10  # points on a run's loss curve


@dataclass(frozen=True)
class ComparisonConfig:
    """Everything that decides what is run; `study.yaml` holds it."""

    data: str = "speeches"
    variants: tuple[str, ...] = ("standard", "euler", "drift")
    controls: tuple[str, ...] = ("symmetric", "uncoupled")
    inits: tuple[str, ...] = ("gpt2", "fan_in")
    seeds: int = 3
    preset: str = "tiny"
    tokens: int | None = None
    minutes: float | None = None  # for the whole comparison; turned into tokens by measuring first
    tokenizer: str = "bpe:2048"
    seq_len: int = 128
    batch_size: int = 16
    lr: float = 3e-3
    schedule: str = "cosine"
    tune_lr: bool = False
    lr_factors: tuple[float, ...] = (0.5, 1.0, 2.0)
    match: str = "tokens"
    verdict: bool = True
    confidence: float = 0.95
    device: str = "auto"

    def to_dict(self) -> dict[str, Any]:
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ComparisonConfig:
        known = {field.name for field in fields(cls)}
        for name in values:
            if name not in known:
                raise unknown("setting of a comparison", name, known)
        ready: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        return cls(**ready)

    def to_command(self, out: str) -> str:
        """The command line that asks this question."""
        words = ["qkflow", "compare"]
        default = ComparisonConfig()
        for field in fields(self):
            value = getattr(self, field.name)
            # Always named: what a reader wants to see. Otherwise only what differs from the default.
            if value is None or (
                value == getattr(default, field.name) and field.name not in _ALWAYS_IN_COMMAND
            ):
                continue
            flag = "--" + field.name.replace("_", "-")
            if isinstance(value, bool):
                words.append(flag if value else flag.replace("--", "--no-", 1))
            elif isinstance(value, tuple):
                words += [flag, ",".join(f"{v:g}" if isinstance(v, float) else v for v in value) or "none"]
            else:
                words += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
        return shlex.join([*words, "--out", out])


_ALWAYS_IN_COMMAND = {"data", "variants", "seeds", "preset"}


@dataclass(frozen=True)
class Cell:
    """A model from one start: what the seeds repeat. `symmetric` is the standard model from another start."""

    variant: Variant
    init: InitScheme

    @property
    def name(self) -> str:
        return f"{self.variant.model_name}@{self.init}"

    @property
    def same_init_baseline(self) -> str:
        """The standard model from the same start: what the same-start difference is taken to."""
        start = self.init if self.variant.symmetric is None else InitScheme(self.init.base)
        return f"{STANDARD}@{start}"


@dataclass(frozen=True)
class RunSpec:
    """One training run: the cell and seed it stands for, and the config its worker reads."""

    phase: str  # calibrate | tune | compare
    cell: str
    seed: int
    lr: float
    tokens: int
    config: dict[str, Any]

    @property
    def id(self) -> str:
        """Readable, and unique by content: two runs with one id are the same run."""
        canonical = json.dumps(self.config, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(canonical.encode()).hexdigest()[:10]
        return f"{re.sub(r'[^A-Za-z0-9_.]+', '-', self.cell)}.s{self.seed}.{digest}"

    @property
    def steps(self) -> int:
        return math.ceil(self.tokens / (self.config["train"]["batch_size"] * self.config["data"]["seq_len"]))

    def to_dict(self) -> dict[str, Any]:
        """What `study.yaml` says of it; the config itself lies in the run's folder."""
        return {"id": self.id, **{k: v for k, v in asdict(self).items() if k != "config"}}


def build_run_config(
    config: ComparisonConfig,
    cell: Cell,
    *,
    seed: int,
    lr: float,
    tokens: int,
    data_overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The `config.yaml` of one run: the one place that knows its shape."""
    variant = cell.variant
    model: dict[str, Any] = {
        "preset": config.preset,
        "attention": {"coupling": variant.coupling, "scoring": variant.scoring},
        "init": str(cell.init),
    }
    train: dict[str, Any] = {
        "tokens": tokens,
        "batch_size": config.batch_size,
        "lr": lr,
        "schedule": config.schedule,
        "seed": seed,
        "evaluations": EVALS_PER_RUN,
        "eval_tokens": max(8_192, min(tokens // EVALS_PER_RUN, 32_768)),  # a fraction of what training costs
        "device": config.device,
    }
    if variant.pace:
        train["pace"] = float(variant.pace)
    if variant.slow_path:
        from qkflow.studies.slow_path_variants import slow_path_variant as timescale

        changes = timescale(variant.slow_path, model, config.seq_len)
        model, train = {**model, **changes.model}, {**train, **changes.train}
    corpus = {"corpus": config.data, "tokenizer": config.tokenizer, "seq_len": config.seq_len}
    return {"model": model, "data": {**corpus, **(data_overrides or {})}, "train": train}


@dataclass(frozen=True)
class Arm:
    """A row of the answer: a variant and the cells it is tried in."""

    variant: Variant
    role: str  # reference | variant | control
    cells: tuple[Cell, ...]

    def to_dict(self) -> dict[str, Any]:
        cells = [
            {"name": cell.name, "init": str(cell.init), "same_init_baseline": cell.same_init_baseline}
            for cell in self.cells
        ]
        return {
            "name": self.variant.name,
            "role": self.role,
            "model": self.variant.model_name,
            "cells": cells,
        }


@dataclass(frozen=True)
class Grid:
    """The arms of a question, read and checked; first the plain model, which gives the reference."""

    config: ComparisonConfig
    arms: tuple[Arm, ...]

    @property
    def cells(self) -> list[Cell]:
        """Every cell once: the symmetric start may stand both as a contestant and as a start asked for."""
        return list({cell.name: cell for one in self.arms for cell in one.cells}.values())

    def build_runs(
        self,
        phase: str,
        seeds: Sequence[int],
        *,
        tokens_by_model: Mapping[str, int],  # by model
        cells: Sequence[Cell] | None = None,
        lr_by_cell: Mapping[str, float] | None = None,  # by cell
        lr_factors: Sequence[float] = (1.0,),
        data_overrides: Mapping[str, Any] | None = None,
    ) -> list[RunSpec]:
        """All runs of a phase, early seeds first, so that a first paired answer is there early."""
        runs = []
        for seed in seeds:
            for cell in self.cells if cells is None else cells:
                for factor in lr_factors:
                    rate = (lr_by_cell or {}).get(cell.name, self.config.lr) * factor
                    budget = tokens_by_model[cell.variant.model_name]
                    config = build_run_config(
                        self.config, cell, seed=seed, lr=rate, tokens=budget, data_overrides=data_overrides
                    )
                    runs.append(RunSpec(phase, cell.name, seed, rate, budget, config))
        return runs

    def one_cell_per_model(self) -> list[Cell]:
        """The start decides what is learned but not what a step costs: enough to measure costs on."""
        firsts: dict[str, Cell] = {}
        for cell in self.cells:
            firsts.setdefault(cell.variant.model_name, cell)
        return list(firsts.values())


def build_grid(config: ComparisonConfig, components: ComponentRegistry | None = None) -> Grid:
    """Check a question and lay out its arms."""
    check_config(config)
    components = components or registered_components()
    asked = list(dict.fromkeys(InitScheme.parse(text) for text in config.inits))
    variants = parse_variants(config.variants, components)
    controls = parse_variants(config.controls, components)
    everyone = list(dict.fromkeys([*variants, *controls]))
    others = [variant for variant in everyone if not variant.is_standard]
    if not others:
        raise InputError("nothing to compare with standard attention; give e.g. --variants standard,euler")
    # The plain model runs from every start a variant is held to, so that there is always a same-start pair.
    held = [v.init for v in everyone if v.init and (v.is_standard or not v.init.modifier)]
    starts = dict.fromkeys([*asked, *held])
    arms = [Arm(Variant(), "reference", tuple(Cell(Variant(), start) for start in starts))]
    for variant in others:
        role = "control" if variant in controls or variant.name in ComparisonConfig.controls else "variant"
        cells = tuple(Cell(variant, start) for start in variant.resolve_inits(asked))
        arms.append(Arm(variant, role, cells))
    return Grid(config, tuple(arms))


def check_models(grid: Grid) -> None:
    """Build every cell's model once, without its weights: what cannot be built is refused before any run."""
    from qkflow.models import Decoder
    from qkflow.training.config import RunConfig

    q = grid.config
    for cell in grid.cells:
        try:
            config = RunConfig.from_dict(build_run_config(q, cell, seed=0, lr=q.lr, tokens=q.tokens or 1))
            Decoder(config.model_config(PRESETS[q.preset].vocab_size), device="meta")
        except InputError as error:
            raise InputError(f"variant '{cell.variant.name}': {error}") from None


def check_config(config: ComparisonConfig) -> None:
    """Refuse a question that cannot be answered, before anything is written."""
    q = config
    if q.seeds < 1:
        raise InputError(f"--seeds must be at least 1, got {q.seeds}")
    if q.verdict and q.seeds < MIN_SEEDS_FOR_VERDICT:
        raise InputError(
            f"a verdict needs at least {MIN_SEEDS_FOR_VERDICT} seeds, got --seeds {q.seeds}: "
            f"one run says nothing about chance; add seeds, or --no-verdict for the bare numbers"
        )
    if q.tokens is not None and q.minutes is not None:
        raise InputError("give --tokens or --minutes, not both")
    if q.minutes is not None and not 0 < q.minutes < math.inf:
        raise InputError(f"--minutes must be a number above zero, got {q.minutes:g}")
    for name, least in (("seq_len", 2), ("batch_size", 1)):
        if getattr(q, name) < least:
            raise InputError(f"--{name} must be at least {least}, got {getattr(q, name)}")
    if q.tokens is not None and q.tokens < q.batch_size * q.seq_len:
        raise InputError(
            f"--tokens {q.tokens} is less than one step (batch {q.batch_size} × length {q.seq_len} "
            f"= {q.batch_size * q.seq_len} tokens); give more tokens or a smaller batch"
        )
    if not (math.isfinite(q.lr) and q.lr > 0):
        raise InputError(f"--lr must be a positive number, got {q.lr:g}")
    if q.tune_lr and not (q.lr_factors and all(factor > 0 for factor in q.lr_factors)):
        raise InputError("--lr-factors must be positive numbers, e.g. 0.5,1,2")
    for name, known in (("match", MATCH_MODES), ("preset", PRESETS), ("schedule", get_args(Schedule))):
        if getattr(q, name) not in known:
            raise unknown(f"--{name}", getattr(q, name), known)
    if not 0.5 <= q.confidence < 1:
        raise InputError(f"--confidence must lie between 0.5 and 1, got {q.confidence:g}")
    if not q.variants:
        raise InputError("no variant given; write e.g. --variants standard,euler")
    if not q.inits:
        raise InputError("no start given; write e.g. --starts gpt2,fan_in")
