"""From a config to runs: which variants, with which inits and seeds, each as the config of one run."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qkflow.attention import InitScheme
from qkflow.errors import InputError
from qkflow.models.presets import PRESETS
from qkflow.studies.config import ComparisonConfig
from qkflow.studies.plan import PlannedArm, PlannedCell, PlannedRun, Role
from qkflow.studies.variants import (
    STANDARD,
    ComponentRegistry,
    Variant,
    parse_variants,
    registered_components,
)

TUNING_SEED = 10_000  # learning rates are chosen on a seed that is not compared
CALIBRATION_SEEDS = (20_000, 20_001, 20_002)
CALIBRATION_STEPS = 20
EVALS_PER_RUN = 10  # points on the loss curve of a run


@dataclass(frozen=True)
class Cell:
    """One model with one init; the seeds repeat it. `symmetric` is the standard model with another init."""

    variant: Variant
    init: InitScheme

    @property
    def name(self) -> str:
        return f"{self.variant.model_name}@{self.init}"

    @property
    def same_init_baseline(self) -> str:
        """The cell of the standard model with the same init."""
        init = self.init if self.variant.symmetric is None else InitScheme(self.init.base)
        return f"{STANDARD}@{init}"

    def plan(self) -> PlannedCell:
        return PlannedCell(self.name, str(self.init), self.same_init_baseline)


@dataclass(frozen=True)
class RunSpec:
    """One training run: its cell and seed, and the config that its worker reads."""

    phase: str  # calibrate | tune | compare | finetune
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
        return f"{re.sub(r'[^A-Za-z0-9_.]+', '-', self.cell)}.s{self.seed}.{digest}"

    @property
    def steps(self) -> int:
        return math.ceil(self.tokens / (self.config["train"]["batch_size"] * self.config["data"]["seq_len"]))

    def plan(self) -> PlannedRun:
        return PlannedRun(self.id, self.phase, self.cell, self.seed, self.lr, self.tokens)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of `study.yaml`; the config itself is in the run's folder."""
        return asdict(self.plan())


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
        "eval_tokens": max(8_192, min(tokens // EVALS_PER_RUN, 32_768)),  # keeps evaluation cheap
        "device": config.device,
    }
    if variant.pace:
        train["pace"] = float(variant.pace)
    if variant.slow_path:
        from qkflow.studies.slow_path_variants import slow_path_variant

        overrides = slow_path_variant(variant.slow_path, model, config.seq_len)
        model, train = {**model, **overrides.model}, {**train, **overrides.train}
    corpus = {"corpus": config.data, "tokenizer": config.tokenizer, "seq_len": config.seq_len}
    return {"model": model, "data": {**corpus, **(data_overrides or {})}, "train": train}


@dataclass(frozen=True)
class Arm:
    """A variant and the cells it is trained in; one row of the summary."""

    variant: Variant
    role: Role
    cells: tuple[Cell, ...]

    def plan(self) -> PlannedArm:
        cells = tuple(cell.plan() for cell in self.cells)
        return PlannedArm(self.variant.name, self.role, self.variant.model_name, cells)


@dataclass(frozen=True)
class Grid:
    """The arms of a comparison. The first is the standard model, whose best init is the reference."""

    config: ComparisonConfig
    arms: tuple[Arm, ...]

    @property
    def cells(self) -> list[Cell]:
        """Every cell once: a symmetric init may belong to the standard model and to a control."""
        return list({cell.name: cell for arm in self.arms for cell in arm.cells}.values())

    def build_runs(
        self,
        phase: str,
        seeds: Sequence[int],
        *,
        tokens_by_model: Mapping[str, int],
        cells: Sequence[Cell] | None = None,
        lr_by_cell: Mapping[str, float] | None = None,
        lr_factors: Sequence[float] = (1.0,),
        data_overrides: Mapping[str, Any] | None = None,
    ) -> list[RunSpec]:
        """Return all runs of a phase. All cells of one seed come first, so that pairs are complete early."""
        runs = []
        for seed in seeds:
            for cell in self.cells if cells is None else cells:
                for factor in lr_factors:
                    lr = (lr_by_cell or {}).get(cell.name, self.config.lr) * factor
                    tokens = tokens_by_model[cell.variant.model_name]
                    config = build_run_config(
                        self.config, cell, seed=seed, lr=lr, tokens=tokens, data_overrides=data_overrides
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
    variants = parse_variants(config.variants, components)
    controls = parse_variants(config.controls, components)
    everyone = list(dict.fromkeys([*variants, *controls]))
    others = [variant for variant in everyone if not variant.is_standard]
    if not others:
        raise InputError(
            "--variants has only standard attention: add what to compare it with, e.g. standard,euler",
            code="nothing-to-compare",
        )
    # The standard model also runs with the inits that variants fix, so that every cell has a same-init pair.
    fixed = [v.init for v in everyone if v.init and (v.is_standard or not v.init.modifier)]
    standard_inits = dict.fromkeys([*inits, *fixed])
    arms = [Arm(Variant(), "reference", tuple(Cell(Variant(), init) for init in standard_inits))]
    for variant in others:
        is_control = variant in controls or variant.name in ComparisonConfig.controls
        cells = tuple(Cell(variant, init) for init in variant.resolve_inits(inits))
        arms.append(Arm(variant, "control" if is_control else "variant", cells))
    return Grid(config, tuple(arms))


def check_models(grid: Grid) -> None:
    """Build the model of every cell on the meta device, so that an invalid one is rejected before any run."""
    from qkflow.models import Decoder
    from qkflow.training.config import RunConfig

    config = grid.config
    for cell in grid.cells:
        try:
            values = build_run_config(config, cell, seed=0, lr=config.lr, tokens=config.tokens or 1)
            model_config = RunConfig.from_dict(values).model_config(PRESETS[config.preset].vocab_size)
            Decoder(model_config, device="meta")
        except InputError as error:
            raise InputError(f"variant '{cell.variant.name}': {error}", code=error.code) from None
