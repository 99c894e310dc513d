"""`qkflow reproduce`: list, plan, rehearse or run the published experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from qkflow import console
from qkflow.cli.commands.compare import print_comparison, print_interrupted
from qkflow.cli.commands.plan import print_plan
from qkflow.cli.options import options_from
from qkflow.errors import InputError
from qkflow.papers.planning import RecipePlan, TaskPlan, plan_recipe
from qkflow.papers.recipe import ControlledTaskConfig, Recipe, load_recipe, recipe_names, recipe_path
from qkflow.papers.reproduce import reproduce as run_comparisons
from qkflow.studies import Comparison, ComparisonConfig
from qkflow.studies.config import ExecutionConfig
from qkflow.studies.hardware.config import HardwareConfig
from qkflow.studies.pace import PaceStudyConfig
from qkflow.studies.runner.execution import StudyInterrupted

META = "meta"
_CONFIG_OPTIONS = (
    *("data", "tokens", "seeds", "preset", "tokenizer", "seq_len", "batch_size", "accumulate", "lr"),
    "device",
)
_EXECUTION_OPTIONS = tuple(ExecutionConfig.__dataclass_fields__)
_HARDWARE_OPTIONS = tuple(HardwareConfig.__dataclass_fields__)


@options_from(
    ComparisonConfig,
    ExecutionConfig,
    HardwareConfig,
    as_text=("tokens",),
    only=(*_CONFIG_OPTIONS, *_EXECUTION_OPTIONS, *_HARDWARE_OPTIONS),
    unset=_CONFIG_OPTIONS,
)
def reproduce(
    settings: dict[str, Any],
    study: Annotated[str | None, tyro.conf.Positional] = None,
    scale: str = "tiny",
    plan: bool = False,
    show: bool = False,
    stages: tuple[str, ...] = (),
    out: Path | None = None,
    markdown: bool = False,
    json: bool = False,
) -> int:
    """List the published experiments, or plan, rehearse or run one of them.

    Every experiment is a recipe with two scales: `paper`, the published size, and `tiny`, for a laptop. What
    the papers do not publish (budgets, learning rates) is assumed, and listed with the recipe. --show prints
    the YAML of a recipe: redirect it to a file, edit it, and pass the path of the file.

    --plan prints memory, hours and cost on the --hardware, and trains nothing. --device meta builds every
    model without storage, sharded as on many devices, and prints the layout of its checkpoints. The options
    of a comparison (--data, --tokens, --seeds, …) replace those of the recipe; --tokens is that of the first
    stage. The same command resumes an interrupted study.

    examples:
      qkflow reproduce
      qkflow reproduce fast-slow
      qkflow reproduce fast-slow --stages short --data my.txt --out runs/mine
      qkflow reproduce coupling --data wikitext-2
      qkflow reproduce coupling-60m --show
      qkflow reproduce affine-differential-455m --scale paper --plan --hardware h100 --usd-per-hour 2.5
      qkflow reproduce affine-differential-455m --scale paper --device meta --world-size 8 --parallel fsdp

    Args:
        study: name of a recipe, or path of a YAML file, e.g. ./mine.yaml (default: list all).
        scale: tiny or paper.
        plan: print memory, hours and cost, and exit.
        show: print the recipe as YAML, and exit.
        stages: stages to run of the recipe, e.g. short (default: all).
        out: folder of the study (default: runs/NAME, runs/NAME-paper at the scale of the paper).
        markdown: print the list as Markdown.
        json: print one JSON object on stdout.
    """
    if study is None:
        return list_recipes(markdown, json)
    recipe = load_recipe(study)
    if show:
        print(recipe_path(study).read_text(encoding="utf-8"), end="")
        return 0
    hardware = HardwareConfig(**{name: settings.pop(name) for name in _HARDWARE_OPTIONS})
    execution = {name: settings.pop(name) for name in _EXECUTION_OPTIONS}
    stage_names = tuple(name for text in stages for name in text.split(",") if name)
    folder = out or Path("runs") / (recipe.name + ("-paper" if scale == "paper" else ""))
    if settings.get("device") == META:
        del settings["device"]
        return _rehearse(recipe, scale, hardware, settings, json)
    for stage in stage_names or recipe.stage_names:
        recipe.config(scale, stage, **settings)  # raises before anything is printed or written
    if plan:
        planned = plan_recipe(recipe, scale, hardware, stage_names, **settings)
        return _print_recipe_plan(recipe, planned, json)
    _check_options(recipe, hardware, execution)
    try:
        if recipe.kind == "comparison":
            return _run_comparisons(study, recipe, scale, stage_names, folder, execution, settings, json)
        return _run_task(recipe, recipe.config(scale, **settings), folder, execution["jobs"], json)
    except StudyInterrupted:
        return print_interrupted()


def _check_options(recipe: Recipe, hardware: HardwareConfig, execution: dict[str, Any]) -> None:
    """Raise InputError for an option that the runs of the recipe would ignore."""
    for name in _HARDWARE_OPTIONS:
        if getattr(hardware, name) != getattr(HardwareConfig, name):
            raise InputError(
                f"--{name.replace('_', '-')} is an option of --plan and --device meta; the runs themselves "
                "take --processes-per-run, --engine and --jobs",
                code="option-of-plan",
            )
    for name in _EXECUTION_OPTIONS if recipe.kind != "comparison" else ():
        if name != "jobs" and execution[name] != getattr(ExecutionConfig, name):
            raise InputError(
                f"--{name.replace('_', '-')} is an option of comparisons, and {recipe.name} trains small "
                "models on this machine: use --jobs",
                code="option-of-comparison",
            )


def list_recipes(markdown: bool, json: bool) -> int:
    """Print every recipe with its claim."""
    recipes = [load_recipe(name) for name in recipe_names()]
    if json:
        rows = [
            {"name": r.name, "kind": r.kind, "paper": r.paper, "claim": r.claim, "published": r.published}
            for r in recipes
        ]
        console.emit_json({"recipes": rows})
    elif markdown:
        print("| recipe | claim | paper |\n|---|---|---|")
        for recipe in recipes:
            print(f"| `{recipe.name}` | {recipe.claim} | {recipe.paper} |")
    else:
        table = Table(box=None, pad_edge=False)
        table.add_column("recipe", no_wrap=True)
        table.add_column("claim", overflow="fold")
        table.add_column("paper", overflow="fold")
        for recipe in recipes:
            table.add_row(recipe.name, recipe.claim, recipe.paper)
        console.out.print(table)
    return 0


def _print_recipe_plan(recipe: Recipe, planned: RecipePlan, json: bool) -> int:
    if json:
        console.emit_json(planned.to_dict())
        return 0
    _print_claim(recipe)
    for name, stage in planned.stages.items():
        console.out.rule(f"{recipe.name}, {planned.scale}, {name}")
        if isinstance(stage, TaskPlan):
            _print_task_plan(stage)
        else:
            print_plan(stage)
    for sentence in recipe.assumed:
        console.out.print(f"! assumed: {sentence}", markup=False, highlight=False, style="yellow")
    return 0


def _print_claim(recipe: Recipe) -> None:
    console.out.print(f"{recipe.paper}: {recipe.claim}", markup=False, highlight=False)
    for what, value in recipe.published.items():
        text = " / ".join(map(str, value)) if isinstance(value, list) else value
        console.out.print(f"  published: {what}: {text}", markup=False, highlight=False)


def _print_task_plan(planned: TaskPlan) -> None:
    text = (
        f"{', '.join(planned.arms)}: {planned.runs} runs, {planned.steps:,} steps, "
        f"{planned.flops:.2g} FLOPs, at least {planned.device_hours:.2g} device hours"
    )
    console.out.print(text, markup=False, highlight=False)
    for note in planned.notes:
        console.out.print(f"! {note}", markup=False, highlight=False, style="yellow")


def _rehearse(
    recipe: Recipe, scale: str, hardware: HardwareConfig, settings: dict[str, Any], json: bool
) -> int:
    from qkflow.papers.rehearsal import rehearse_recipe

    layouts = rehearse_recipe(recipe, scale, hardware, **settings)
    if json:
        stages = {stage: [layout.to_dict() for layout in each] for stage, each in layouts.items()}
        console.emit_json({"recipe": recipe.name, "scale": scale, "stages": stages})
        return 0
    table = Table(title="checkpoints (weights and optimizer state)", box=None, title_justify="left")
    for heading in ("stage", "model", "rank", "tensors", "MB of the rank", "MB of all ranks"):
        table.add_column(heading, justify="left" if heading in ("stage", "model") else "right")
    for stage, each in layouts.items():
        for layout in each:
            sizes = f"{layout.n_bytes / 1e6:,.1f}", f"{layout.total_bytes / 1e6:,.1f}"
            rank = f"{layout.rank} of {layout.world_size}"
            table.add_row(stage, layout.model, rank, str(len(layout.tensors)), *sizes)
    console.out.print(table)
    return 0


def _run_comparisons(
    study: str,
    recipe: Recipe,
    scale: str,
    stages: tuple[str, ...],
    folder: Path,
    execution: dict[str, Any],
    settings: dict[str, Any],
    json: bool,
) -> int:
    exit_codes: list[int] = []

    def print_stage(stage: str, comparison: Comparison, findings: dict[str, Any]) -> None:
        exit_codes.append(0 if comparison.is_complete else 1)
        if not json:
            if len(exit_codes) == 1:
                _print_claim(recipe)
            console.out.rule(f"{recipe.name}, {stage}")
            print_comparison(comparison, json=False)
            for sentence in findings.get("sentences", []):
                console.out.print(f"• {sentence}", markup=False, highlight=False)

    report = run_comparisons(
        study,
        folder,
        scale=scale,
        stages=stages,
        on_stage_end=print_stage,
        execution_kwargs=execution,
        **settings,
    )
    if json:
        console.emit_json(report)
    return max(exit_codes)


def _run_task(
    recipe: Recipe,
    config: ComparisonConfig | PaceStudyConfig | ControlledTaskConfig,
    folder: Path,
    jobs: int | None,
    json: bool,
) -> int:
    """Run a pace study, or the controlled task."""
    if not json:
        _print_claim(recipe)
    if isinstance(config, PaceStudyConfig):
        from qkflow.cli.commands.pace_study import report_study
        from qkflow.studies.pace import run_pace_study

        return report_study(run_pace_study(config, folder, jobs), json)
    assert isinstance(config, ControlledTaskConfig)
    from dataclasses import replace

    from qkflow.cli.commands.pace import run_fixed_attention, run_settings
    from qkflow.papers.faster_qk.synthetic import FIGURE_CONFIGS

    seeds, figure = range(config.first_seed, config.first_seed + config.seeds), folder / "figure.html"
    folder.mkdir(parents=True, exist_ok=True)
    if recipe.kind == "fixed-attention":
        run_fixed_attention(seeds, {"steps": config.steps} if config.steps else {}, figure, json)
    else:
        shortened = [
            each if config.steps is None or config.steps >= each.steps else replace(each, steps=config.steps)
            for each in FIGURE_CONFIGS
        ]
        run_settings(shortened, seeds, jobs or 0, figure, json)
    return 0
