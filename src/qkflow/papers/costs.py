"""What it would take to settle a claim at the size of its paper: its recipes, and their cost."""

from __future__ import annotations

from qkflow.papers.planning import plan_recipe
from qkflow.papers.recipe import load_recipe
from qkflow.studies.config import ComparisonConfig
from qkflow.studies.hardware.config import HardwareConfig
from qkflow.studies.hardware.plan import count_study

HARDWARE = HardwareConfig("a100")  # one device per run


class StudyCost:
    """The cost of recipes at the scale of their paper, on the default hardware of the planner."""

    def __init__(self, *recipes: str) -> None:
        self.recipes = recipes

    def __str__(self) -> str:
        return "; ".join(map(_describe_cost, self.recipes))


def _describe_cost(name: str) -> str:
    recipe, device = load_recipe(name), HARDWARE.device()
    command = f"`qkflow reproduce {name} --scale paper`"
    if recipe.kind != "comparison":
        planned = plan_recipe(recipe, "paper", HARDWARE)
        runs = sum(stage.runs for stage in planned.stages.values())
        return f"{command}: {runs} runs of a small model"
    counts = []
    for stage in recipe.stage_names:
        config = recipe.config("paper", stage)
        assert isinstance(config, ComparisonConfig)
        counts.append((*count_study(config), device.peak_flops(config.precision)))
    hours = sum(flops / (device.utilization * peak) for _, flops, peak in counts) / 3600
    runs, flops = sum(each[0] for each in counts), sum(each[1] for each in counts)
    speed = f"one {device.name.upper()} at {device.utilization:.0%} of its peak"
    return f"{command}: {runs} runs, {flops:.1e} FLOPs, about {_round_hours(hours)} hours of {speed}"


def _round_hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 1 else f"{hours:.1g}"
