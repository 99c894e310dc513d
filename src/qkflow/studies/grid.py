"""From a config to runs: which variants, with which inits and seeds, each as the config of one run."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from qkflow.attention import Attention, InitScheme
from qkflow.errors import InputError
from qkflow.studies.config import ComparisonConfig
from qkflow.studies.estimate import MAX_RUNS, check_run_count, vocab_size
from qkflow.studies.overrides import to_sections
from qkflow.studies.plan import PlannedArm, PlannedCell, PlannedRun, Role
from qkflow.studies.variants import (
    ComponentRegistry,
    Variant,
    parse_variants,
    registered_components,
    split_variants,
    without_modifier,
)
from qkflow.training.config import DEFAULT_LR, OptimizerName, RunConfig

TUNING_SEED = 10_000  # learning rates are chosen on a seed that is not compared
SCREENING_SEED = 30_000  # the first of the seeds that choose inits
NOISE_FLOOR_SEED = 40_000  # the first of the seeds of the A/A arm
COST_SEEDS = (20_000, 20_001, 20_002)
COST_STEPS = 20
POOL_NAME = "baselines"  # of the first arm, if it has several variants
_MAX_ID_PREFIX = 100  # characters; the names of files are limited
# Evaluations and probes of a run cost about EVAL_SHARE of its training: half for the final evaluation, a
# quarter each for the loss curve and the probes. Costs are in tokens of a forward pass, a third of training.
EVAL_SHARE = 0.1
FORWARD_SHARE = 1 / 3
PROBE_COST = 3_000  # forward tokens that take as long as a probe of the tiny preset; larger models: fewer
FINAL_EVAL_TOKENS = (8_192, 32_768)  # fewest and most; its loss decides the verdict
CURVE_POINTS = (4, 10)
MIN_CURVE_TOKENS = 768  # per point


@dataclass(frozen=True)
class Cell:
    """One model with one init; the seeds repeat it. `symmetric` is the standard model with another init."""

    variant: Variant
    init: InitScheme
    same_init_baseline: str = ""  # name of a cell of the pool

    @property
    def name(self) -> str:
        return f"{self.variant.model_name}@{self.init}"

    @property
    def fixed_lr(self) -> float | None:
        """The learning rate, if the variant sets it."""
        lr: float | None = self.variant.override("train.lr")
        return lr

    def base_lr(self, config: ComparisonConfig) -> float:
        """Return the learning rate before any search: of the variant, of the comparison, or by optimizer."""
        optimizer: OptimizerName = self.variant.override("train.optimizer", config.optimizer)
        return next(lr for lr in (self.fixed_lr, config.lr, DEFAULT_LR[optimizer]) if lr is not None)

    def tokenizer(self, config: ComparisonConfig) -> str:
        return str(self.variant.override("data.tokenizer", config.tokenizer))

    def seq_len(self, config: ComparisonConfig) -> int:
        return int(self.variant.override("data.seq_len", config.seq_len))

    def tokens_per_step(self, config: ComparisonConfig) -> int:
        return self.seq_len(config) * int(self.variant.override("train.batch_size", config.batch_size))

    def plan(self) -> PlannedCell:
        variant = self.variant.name_without_init
        return PlannedCell(self.name, variant, str(self.init), self.same_init_baseline)


@dataclass(frozen=True)
class RunSpec:
    """One training run: its cell and seed, and the config that its worker reads."""

    phase: str  # cost | tune | screen | compare | noise | finetune
    cell: str
    seed: int
    lr: float
    tokens: int
    config: dict[str, Any]

    @property
    def id(self) -> str:
        """A readable name with a hash of the config: two runs with the same id are the same run."""
        canonical = json.dumps(self.config, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(canonical.encode()).hexdigest()[:10]
        prefix = re.sub(r"[^A-Za-z0-9_.]+", "-", self.cell)[:_MAX_ID_PREFIX]
        return f"{prefix}.s{self.seed}.{digest}"

    @property
    def steps(self) -> int:
        return math.ceil(self.tokens / (self.config["train"]["batch_size"] * self.config["data"]["seq_len"]))

    def plan(self) -> PlannedRun:
        return PlannedRun(self.id, self.phase, self.cell, self.seed, self.lr, self.tokens)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of `study.yaml`; the config itself is in the run's folder."""
        return asdict(self.plan())


def eval_settings(tokens: int, tokens_per_step: int) -> dict[str, int]:
    """Return how often, and on how many tokens, a run of `tokens` is evaluated and probed."""
    budget = EVAL_SHARE * tokens / FORWARD_SHARE
    final_tokens = _clamp(budget / 2, *FINAL_EVAL_TOKENS)
    points = _clamp(budget / 4 / MIN_CURVE_TOKENS, *CURVE_POINTS)
    probes = _clamp(round(budget / 4 / PROBE_COST), 1, points)
    return {
        "evaluations": points,
        "eval_tokens": _clamp(budget / 4 / points, MIN_CURVE_TOKENS, final_tokens),
        "final_eval_tokens": final_tokens,
        "probe_every": math.ceil(tokens / tokens_per_step / probes),
    }


def _clamp(value: float, low: int, high: int) -> int:
    return min(max(int(value), low), high)


def build_run_config(
    config: ComparisonConfig,
    cell: Cell,
    *,
    seed: int,
    lr: float,
    tokens: int,
    data_overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the `config.yaml` of one run."""
    variant, overrides = cell.variant, to_sections(cell.variant.overrides)
    attention = {"coupling": variant.coupling, "scoring": variant.scoring}
    model: dict[str, Any] = {
        "preset": config.preset,
        "init": str(cell.init),
        **overrides.model,
        "attention": {**attention, **overrides.model.get("attention", {})},
    }
    train: dict[str, Any] = {
        "tokens": tokens,
        "batch_size": config.batch_size,
        "schedule": config.schedule,
        "seed": seed,
        **eval_settings(tokens, cell.tokens_per_step(config)),
        "device": config.device,
        **overrides.train,
        "lr": lr,
    }
    # an absent key keeps the ids of runs that were made before the option
    if config.precision != "fp32":
        train.setdefault("precision", config.precision)
    if config.accumulate != 1:
        train.setdefault("accumulate", config.accumulate)
    if config.optimizer != "adamw":
        train.setdefault("optimizer", config.optimizer)
    if variant.pace:
        train["pace"] = float(variant.pace)
    if variant.slow_path:
        model, train = _add_slow_path(variant.slow_path, model, train, cell.seq_len(config))
    corpus = {"corpus": config.data, "tokenizer": config.tokenizer, "seq_len": config.seq_len}
    return {"model": model, "data": {**corpus, **overrides.data, **(data_overrides or {})}, "train": train}


def _add_slow_path(
    name: str, model: dict[str, Any], train: dict[str, Any], seq_len: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    from qkflow.studies.slow_path_variants import slow_path_variant

    slow = model.pop("slow", {})  # its attention; the other keys are options of the component
    added = slow_path_variant(name, model, seq_len)
    model = {**model, **added.model}
    if slow:
        model["slow"] = {**model["slow"], **slow}
    frozen = [*train.get("freeze", ()), *added.train.get("freeze", ())]
    return model, {**train, **added.train, **({"freeze": frozen} if frozen else {})}


@dataclass(frozen=True)
class Arm:
    """A variant, or the pool of baselines, and the cells it is trained in; one row of the summary."""

    name: str
    role: Role
    cells: tuple[Cell, ...]

    def plan(self) -> PlannedArm:
        return PlannedArm(self.name, self.role, tuple(cell.plan() for cell in self.cells))


@dataclass(frozen=True)
class Grid:
    """The arms of a comparison. The first is the pool of baselines, whose best cell is the reference."""

    config: ComparisonConfig
    arms: tuple[Arm, ...]

    @property
    def cells(self) -> list[Cell]:
        """Every cell once: a symmetric init may belong to the standard model and to a control."""
        return list({cell.name: cell for arm in self.arms for cell in arm.cells}.values())

    @property
    def base_model(self) -> str:
        """The model whose cost is the unit of equal time and equal FLOPs: that of the first baseline."""
        return self.arms[0].cells[0].variant.model_name

    @property
    def n_runs(self) -> int:
        """The most runs there can be: inits are retired, and a wider grid of learning rates adds some."""
        tuned = [cell for cell in self.cells if self.config.tune_lr and cell.fixed_lr is None]
        screening = len(self.screened_cells) * self.config.screening_seeds
        judged = (len(self.cells) + self.config.verdict) * self.config.n_seeds  # 1: the noise floor
        return screening + judged + len(tuned) * len(self.config.lr_factors)

    @property
    def screened_cells(self) -> list[Cell]:
        """The cells of arms that have to choose an init."""
        chosen = [arm for arm in self.arms if len(arm.cells) > 1]
        return list({cell.name: cell for arm in chosen for cell in arm.cells}.values())

    def build_runs(
        self,
        phase: str,
        seeds: Sequence[int],
        *,
        tokens_by_model: Mapping[str, int],
        cells: Sequence[Cell] | None = None,
        lr_by_cell: Mapping[str, float] | None = None,
        lr_factors: Sequence[float] = (1.0,),
        data_overrides: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> list[RunSpec]:
        """Return all runs of a phase. All cells of one seed come first, so that pairs are complete early.

        `data_overrides` are keys of the section `data` by tokenizer. A cell that fixes its learning rate
        runs with that, whatever `lr_by_cell` and `lr_factors` are.
        """
        runs = []
        for seed in seeds:
            for cell in self.cells if cells is None else cells:
                data = (data_overrides or {}).get(cell.tokenizer(self.config))
                for factor in lr_factors if cell.fixed_lr is None else (1.0,):
                    lr = (lr_by_cell or {}).get(cell.name, cell.base_lr(self.config)) * factor
                    tokens = tokens_by_model[cell.variant.model_name]
                    config = build_run_config(
                        self.config, cell, seed=seed, lr=lr, tokens=tokens, data_overrides=data
                    )
                    runs.append(RunSpec(phase, cell.name, seed, lr, tokens, config))
        return runs

    def one_cell_per_model(self) -> list[Cell]:
        """Return one cell per model, to measure costs on: the init does not change the cost of a step."""
        cells: dict[str, Cell] = {}
        for cell in self.cells:
            cells.setdefault(cell.variant.model_name, cell)
        return list(cells.values())


def build_grid(config: ComparisonConfig, components: ComponentRegistry | None = None) -> Grid:
    """Check a config and lay out its arms."""
    config.check()
    components = components or registered_components()
    inits = list(dict.fromkeys(InitScheme.parse(text) for text in config.inits))
    _check_sweeps(config, len(inits))
    baselines = parse_variants(config.baselines, components)
    controls = parse_variants(config.controls, components)
    variants = list(dict.fromkeys([*parse_variants(config.variants, components), *controls]))
    others = [v for v in variants if v not in baselines and replace(v, init=None) not in baselines]
    if not others:
        raise InputError(
            "--variants has only baselines: add what to compare them with, e.g. standard,euler",
            code="nothing-to-compare",
        )
    pool = _pool_cells(baselines, variants, inits)
    names = {cell.variant.name_without_init for cell in pool}
    arms = [Arm(names.pop() if len(names) == 1 else POOL_NAME, "reference", pool)]
    for variant in others:
        is_control = variant in controls or variant.name in ComparisonConfig.controls
        cells = tuple(_cell(variant, init, pool) for init in variant.resolve_inits(inits))
        arms.append(Arm(variant.name, "control" if is_control else "variant", cells))
    grid = Grid(config, tuple(arms))
    _check_size(grid)
    return grid


def _check_sweeps(config: ComparisonConfig, n_inits: int) -> None:
    """Refuse a product of sweeps that is too large to enumerate."""
    texts = split_variants([*config.baselines, *config.variants, *config.controls])
    if sum(text.count for text in texts) > MAX_RUNS:
        n_cells = sum(text.count * (1 if text.init else n_inits) for text in texts)
        check_run_count(n_cells * config.n_seeds, config)


def _check_size(grid: Grid) -> None:
    check_run_count(grid.n_runs, grid.config)
    for cell in grid.one_cell_per_model():
        step, seq_len = cell.tokens_per_step(grid.config), cell.seq_len(grid.config)
        if seq_len >= 2 > step:
            raise InputError(
                f"variant '{cell.variant.name}': train.batch_size must be at least 1",
                code="invalid-batch-size",
            )
        if seq_len < 2:
            raise InputError(
                f"variant '{cell.variant.name}': data.seq_len must be at least 2, not {seq_len}",
                code="invalid-seq-len",
            )
        if grid.config.tokens is not None and grid.config.tokens < step:
            raise InputError(
                f"--tokens {grid.config.tokens} is less than one step of '{cell.variant.name}' ({step} "
                "tokens): use more tokens or a smaller batch",
                code="tokens-below-one-step",
            )


def _pool_cells(
    baselines: Sequence[Variant], variants: Sequence[Variant], inits: Sequence[InitScheme]
) -> tuple[Cell, ...]:
    """Return the cells of all baselines.

    A baseline also runs with the inits that it has in --variants, and the standard model with all inits that
    variants fix, so that every cell has a same-init pair.
    """
    fixed = [v.init for v in variants if v.init and not v.init.modifier]
    cells: dict[str, Cell] = {}
    for baseline in baselines:
        own = [v.init for v in variants if v.init and replace(v, init=None) == baseline]
        requested = dict.fromkeys([*inits, *(fixed if baseline == Variant() else []), *own])
        for init in baseline.resolve_inits(requested):
            cell = Cell(baseline, init)
            cells.setdefault(cell.name, cell)
    pool = tuple(cells.values())
    return tuple(_cell(cell.variant, cell.init, pool) for cell in pool)


def _cell(variant: Variant, init: InitScheme, pool: Collection[Cell]) -> Cell:
    """Return a cell with its pair in the pool: the same init, and if possible the same overrides."""
    own_init = without_modifier(init) if variant.init_modifier else init
    same_init = {cell.variant.name_without_init: cell for cell in pool if cell.init == own_init}
    same_overrides = [cell for cell in same_init.values() if cell.variant.overrides == variant.overrides]
    plain = Variant(overrides=variant.overrides).name
    baseline = same_init.get(plain) or next(iter(same_overrides), None) or same_init.get(Variant().name)
    return Cell(variant, init, baseline.name if baseline else "")


def check_models(grid: Grid) -> None:
    """Build every model on the meta device, so that an invalid one is rejected before any run."""
    from qkflow.models import Decoder
    from qkflow.roles import freeze_roles

    config = grid.config
    for cell in grid.one_cell_per_model():
        try:
            lr = cell.base_lr(config)
            values = build_run_config(config, cell, seed=0, lr=lr, tokens=config.tokens or 1)
            size = vocab_size(cell.tokenizer(config), config.preset)
            run = RunConfig.from_dict(values)
            freeze_roles(Decoder(run.model_config(size), device="meta"), run.train.freeze)
        except InputError as error:
            raise InputError(f"variant '{cell.variant.name}': {error}", code=error.code) from None
    for cell in grid.cells:
        _check_init(cell)


def _check_init(cell: Cell) -> None:
    """Raise InputError for an init that a collapsed circuit does not have: meta models skip the init."""
    circuit = cell.variant.override("attention.circuit", "FAFO")
    if circuit == "FAFO":
        return
    try:
        Attention(16, n_heads=2, circuit=circuit, rope=False, init=cell.init)
    except InputError as error:
        raise InputError(f"variant '{cell.variant.name}': {error}", code=error.code) from None
