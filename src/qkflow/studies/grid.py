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

from qkflow.attention import Start
from qkflow.errors import InputError, unknown
from qkflow.models.presets import PRESETS
from qkflow.studies.stats import SMALLEST_SAMPLE
from qkflow.studies.variants import (
    STANDARD,
    Parts,
    Variant,
    parse_variants,
    registered_parts,
)
from qkflow.training.config import Schedule

MATCHES = ("tokens", "time", "flops")
TUNING_SEED = 10_000  # learning rates are chosen on a seed that takes no part in the comparison
CALIBRATION_SEEDS = (20_000, 20_001, 20_002)
CALIBRATION_STEPS = 20
EVALUATIONS = 10  # points on a run's loss curve


@dataclass(frozen=True)
class Question:
    """Everything that decides what is run; `study.yaml` holds it."""

    data: str = "speeches"
    variants: tuple[str, ...] = ("standard", "euler", "drift")
    controls: tuple[str, ...] = ("symmetric", "uncoupled")
    starts: tuple[str, ...] = ("gpt2", "fan_in")
    seeds: int = 3
    preset: str = "tiny"
    tokens: int | None = None
    minutes: float | None = None  # for the whole comparison; turned into tokens by measuring first
    tokenizer: str = "bpe:2048"
    length: int = 128
    batch: int = 16
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
    def from_dict(cls, values: Mapping[str, Any]) -> Question:
        known = {field.name for field in fields(cls)}
        for name in values:
            if name not in known:
                raise unknown("setting of a comparison", name, known)
        ready: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        return cls(**ready)

    def command(self, out: str) -> str:
        """The command line that asks this question."""
        words = ["qkflow", "compare"]
        default = Question()
        for field in fields(self):
            value = getattr(self, field.name)
            # Always named: what a reader wants to see. Otherwise only what differs from the default.
            if value is None or (value == getattr(default, field.name) and field.name not in _ALWAYS_SHOWN):
                continue
            flag = "--" + field.name.replace("_", "-")
            if isinstance(value, bool):
                words.append(flag if value else flag.replace("--", "--no-", 1))
            elif isinstance(value, tuple):
                words += [flag, ",".join(f"{v:g}" if isinstance(v, float) else v for v in value) or "none"]
            else:
                words += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
        return shlex.join([*words, "--out", out])


_ALWAYS_SHOWN = {"data", "variants", "seeds", "preset"}


@dataclass(frozen=True)
class Cell:
    """A model from one start: what the seeds repeat. `symmetric` is the standard model from another start."""

    variant: Variant
    start: Start

    @property
    def name(self) -> str:
        return f"{self.variant.model}@{self.start}"

    @property
    def plain(self) -> str:
        """The standard model from the same start: what the same-start difference is taken to."""
        start = self.start if self.variant.symmetric is None else Start(self.start.base)
        return f"{STANDARD}@{start}"


@dataclass(frozen=True)
class Run:
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
        return math.ceil(self.tokens / (self.config["train"]["batch"] * self.config["data"]["length"]))

    def to_dict(self) -> dict[str, Any]:
        """What `study.yaml` says of it; the config itself lies in the run's folder."""
        return {"id": self.id, **{k: v for k, v in asdict(self).items() if k != "config"}}


def run_config(
    question: Question,
    cell: Cell,
    *,
    seed: int,
    lr: float,
    tokens: int,
    data: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The `config.yaml` of one run: the one place that knows its shape."""
    variant = cell.variant
    model: dict[str, Any] = {
        "preset": question.preset,
        "attention": {"coupling": variant.coupling, "scoring": variant.scoring},
        "start": str(cell.start),
    }
    train: dict[str, Any] = {
        "tokens": tokens,
        "batch": question.batch,
        "lr": lr,
        "schedule": question.schedule,
        "seed": seed,
        "evaluations": EVALUATIONS,
        "eval_tokens": max(8_192, min(tokens // EVALUATIONS, 32_768)),  # a fraction of what training costs
        "device": question.device,
    }
    if variant.pace:
        train["pace"] = float(variant.pace)
    if variant.timescale:
        from qkflow.studies.slow_path_variants import variant as timescale

        changes = timescale(variant.timescale, model, question.length)
        model, train = {**model, **changes.model}, {**train, **changes.train}
    corpus = {"corpus": question.data, "tokenizer": question.tokenizer, "length": question.length}
    return {"model": model, "data": {**corpus, **(data or {})}, "train": train}


@dataclass(frozen=True)
class Contestant:
    """A row of the answer: a variant and the cells it is tried in."""

    variant: Variant
    role: str  # reference | variant | control
    cells: tuple[Cell, ...]

    def to_dict(self) -> dict[str, Any]:
        cells = [{"name": cell.name, "start": str(cell.start), "plain": cell.plain} for cell in self.cells]
        return {"name": self.variant.name, "role": self.role, "model": self.variant.model, "cells": cells}


@dataclass(frozen=True)
class Grid:
    """The contestants of a question, read and checked; first the plain model, which gives the reference."""

    question: Question
    contestants: tuple[Contestant, ...]

    @property
    def cells(self) -> list[Cell]:
        """Every cell once: the symmetric start may stand both as a contestant and as a start asked for."""
        return list({cell.name: cell for one in self.contestants for cell in one.cells}.values())

    def runs(
        self,
        phase: str,
        seeds: Sequence[int],
        *,
        tokens: Mapping[str, int],  # by model
        cells: Sequence[Cell] | None = None,
        lr: Mapping[str, float] | None = None,  # by cell
        factors: Sequence[float] = (1.0,),
        data: Mapping[str, Any] | None = None,
    ) -> list[Run]:
        """All runs of a phase, early seeds first, so that a first paired answer is there early."""
        runs = []
        for seed in seeds:
            for cell in self.cells if cells is None else cells:
                for factor in factors:
                    rate = (lr or {}).get(cell.name, self.question.lr) * factor
                    budget = tokens[cell.variant.model]
                    config = run_config(self.question, cell, seed=seed, lr=rate, tokens=budget, data=data)
                    runs.append(Run(phase, cell.name, seed, rate, budget, config))
        return runs

    def one_cell_per_model(self) -> list[Cell]:
        """The start decides what is learned but not what a step costs: enough to measure costs on."""
        firsts: dict[str, Cell] = {}
        for cell in self.cells:
            firsts.setdefault(cell.variant.model, cell)
        return list(firsts.values())


def build_grid(question: Question, parts: Parts | None = None) -> Grid:
    """Check a question and lay out its contestants."""
    check(question)
    parts = parts or registered_parts()
    asked = list(dict.fromkeys(Start.parse(text) for text in question.starts))
    variants = parse_variants(question.variants, parts)
    controls = parse_variants(question.controls, parts)
    everyone = list(dict.fromkeys([*variants, *controls]))
    others = [variant for variant in everyone if not variant.is_standard]
    if not others:
        raise InputError("nothing to compare with standard attention; give e.g. --variants standard,euler")
    # The plain model runs from every start a variant is held to, so that there is always a same-start pair.
    held = [v.start for v in everyone if v.start and (v.is_standard or not v.start.modifier)]
    starts = dict.fromkeys([*asked, *held])
    contestants = [Contestant(Variant(), "reference", tuple(Cell(Variant(), start) for start in starts))]
    for variant in others:
        role = "control" if variant in controls or variant.name in Question.controls else "variant"
        cells = tuple(Cell(variant, start) for start in variant.starts(asked))
        contestants.append(Contestant(variant, role, cells))
    return Grid(question, tuple(contestants))


def check_models(grid: Grid) -> None:
    """Build every cell's model once, without its weights: what cannot be built is refused before any run."""
    from qkflow.models import Decoder
    from qkflow.training.config import RunConfig

    q = grid.question
    for cell in grid.cells:
        try:
            config = RunConfig.from_dict(run_config(q, cell, seed=0, lr=q.lr, tokens=q.tokens or 1))
            Decoder(config.model_config(PRESETS[q.preset].vocabulary), device="meta")
        except InputError as error:
            raise InputError(f"variant '{cell.variant.name}': {error}") from None


def check(question: Question) -> None:
    """Refuse a question that cannot be answered, before anything is written."""
    q = question
    if q.seeds < 1:
        raise InputError(f"--seeds must be at least 1, got {q.seeds}")
    if q.verdict and q.seeds < SMALLEST_SAMPLE:
        raise InputError(
            f"a verdict needs at least {SMALLEST_SAMPLE} seeds, got --seeds {q.seeds}: "
            f"one run says nothing about chance; add seeds, or --no-verdict for the bare numbers"
        )
    if q.tokens is not None and q.minutes is not None:
        raise InputError("give --tokens or --minutes, not both")
    if q.minutes is not None and not 0 < q.minutes < math.inf:
        raise InputError(f"--minutes must be a number above zero, got {q.minutes:g}")
    for name, least in (("length", 2), ("batch", 1)):
        if getattr(q, name) < least:
            raise InputError(f"--{name} must be at least {least}, got {getattr(q, name)}")
    if q.tokens is not None and q.tokens < q.batch * q.length:
        raise InputError(
            f"--tokens {q.tokens} is less than one step (batch {q.batch} × length {q.length} "
            f"= {q.batch * q.length} tokens); give more tokens or a smaller batch"
        )
    if not (math.isfinite(q.lr) and q.lr > 0):
        raise InputError(f"--lr must be a positive number, got {q.lr:g}")
    if q.tune_lr and not (q.lr_factors and all(factor > 0 for factor in q.lr_factors)):
        raise InputError("--lr-factors must be positive numbers, e.g. 0.5,1,2")
    for name, known in (("match", MATCHES), ("preset", PRESETS), ("schedule", get_args(Schedule))):
        if getattr(q, name) not in known:
            raise unknown(f"--{name}", getattr(q, name), known)
    if not 0.5 <= q.confidence < 1:
        raise InputError(f"--confidence must lie between 0.5 and 1, got {q.confidence:g}")
    if not q.variants:
        raise InputError("no variant given; write e.g. --variants standard,euler")
    if not q.starts:
        raise InputError("no start given; write e.g. --starts gpt2,fan_in")
