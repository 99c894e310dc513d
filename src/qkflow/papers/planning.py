"""What a recipe takes on given hardware: `qkflow reproduce NAME --plan`, and the cost that claims name."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from qkflow.models import ModelConfig
from qkflow.models.cost import hidden_flops_per_token
from qkflow.papers.faster_qk.controlled_task import VOCAB_SIZE as CONTROLLED_VOCAB
from qkflow.papers.faster_qk.fixed_attention import ALPHAS, DEFAULT_STEPS
from qkflow.papers.faster_qk.synthetic import FIGURE_CONFIGS
from qkflow.papers.recipe import ControlledTaskConfig, Recipe
from qkflow.studies.config import ComparisonConfig
from qkflow.studies.hardware.config import HardwareConfig
from qkflow.studies.hardware.plan import StudyCostPlan, plan_comparison
from qkflow.studies.pace import PaceStudyConfig

TASK_VOCAB = 10_000  # words of a task, before it is read
FIXED_ATTENTION_BATCH = 128


@dataclass(frozen=True)
class TaskPlan:
    """Many small runs on a task. Overhead, not FLOPs, decides their time: `device_hours` is a lower bound."""

    arms: tuple[str, ...]
    runs: int
    steps: int  # of all runs
    flops: float
    device_hours: float
    usd: float | None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RecipePlan:
    """The stages of a recipe on given hardware."""

    recipe: str
    scale: str
    stages: dict[str, StudyCostPlan | TaskPlan]

    @property
    def device_hours(self) -> float:
        return sum(stage.device_hours for stage in self.stages.values())

    def to_dict(self) -> dict[str, Any]:
        stages = {name: stage.to_dict() for name, stage in self.stages.items()}
        return {
            "recipe": self.recipe,
            "scale": self.scale,
            "device_hours": self.device_hours,
            "stages": stages,
        }


def plan_recipe(
    recipe: Recipe,
    scale: str,
    hardware: HardwareConfig,
    stages: tuple[str, ...] = (),
    **overrides: Any,
) -> RecipePlan:
    """Plan every stage of a recipe; `overrides` replace its settings."""
    hardware.check()
    planned: dict[str, StudyCostPlan | TaskPlan] = {}
    for stage in stages or recipe.stage_names:
        config = recipe.config(scale, stage, **overrides)
        if isinstance(config, ComparisonConfig):
            planned[stage] = plan_comparison(config, hardware)
        elif isinstance(config, PaceStudyConfig):
            planned[stage] = _plan_pace(recipe, config, hardware)
        else:
            planned[stage] = _plan_controlled_task(recipe, config, hardware)
    return RecipePlan(recipe.name, scale, planned)


def _plan_pace(recipe: Recipe, config: PaceStudyConfig, hardware: HardwareConfig) -> TaskPlan:
    size, task = recipe.size_of_task(), config.resolve_recipe()
    examples = min(size.examples, config.examples or size.examples)
    steps = config.steps or max(1, round(task.epochs * examples / task.batch_size))
    model = ModelConfig(
        vocab_size=TASK_VOCAB,
        n_layers=task.n_layers,
        dim=task.dim,
        n_heads=task.n_heads,
        head_dim=task.head_dim,
        hidden_dim=task.hidden_dim,
        feed_forward="gelu",
        causal=task.generates_answer,
    )
    runs = len(task.ratios) * config.seeds
    per_step = task.batch_size * size.seq_len * hidden_flops_per_token(model, size.seq_len)
    note = f"assumed before the data is read: {examples:,} examples of {size.seq_len} tokens"
    return _task_plan(
        tuple(f"r = {ratio}" for ratio in task.ratios), runs, runs * steps, per_step, hardware, note
    )


def _plan_controlled_task(recipe: Recipe, config: ControlledTaskConfig, hardware: HardwareConfig) -> TaskPlan:
    if recipe.kind == "fixed-attention":
        arms = tuple(f"{kind}, α = {alpha:g}" for kind in ("collapsed", "factorized") for alpha in ALPHAS)
        steps = len(arms) * min(DEFAULT_STEPS, config.steps or DEFAULT_STEPS)
        batch = FIXED_ATTENTION_BATCH
    else:
        arms = tuple(each.name for each in FIGURE_CONFIGS)
        steps = sum(min(each.steps, config.steps or each.steps) for each in FIGURE_CONFIGS)
        batch = FIGURE_CONFIGS[0].batch_size
    # logits, their gradient and the gradient of W_OV; forming W_OV = W_O·W_V and its two gradients
    per_step = 6 * batch * CONTROLLED_VOCAB**2 + 6 * CONTROLLED_VOCAB**3
    note = "50-dimensional matrices: train them on a CPU, all seeds of a setting in one batch"
    return _task_plan(arms, len(arms) * config.seeds, steps * config.seeds, per_step, hardware, note)


def _task_plan(
    arms: tuple[str, ...], runs: int, steps: int, per_step: float, hardware: HardwareConfig, note: str
) -> TaskPlan:
    device = hardware.device()
    flops = steps * per_step
    hours = flops / (device.utilization * device.peak_flops("fp32")) / 3600
    usd = None if hardware.usd_per_hour is None else hours * hardware.usd_per_hour
    return TaskPlan(arms, runs, steps, flops, hours, usd, (note,))
